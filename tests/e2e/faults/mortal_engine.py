"""An engine thread that can be found from outside, and dies when told to, wherever it is, of an error that
nothing in its code has foreseen.

Nothing outside of a process can raise in one of its threads; so a thread beside it does, when the test has
written a file. Nor does anything tell an engine's thread from others that sleep, as Ray's own do at times: so
its number is in a file. Knows the interpreter; of the engine it knows its thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

_POLL_S = 0.02


class Unforeseen(BaseException):
    """No `except Exception` takes it for a failed forward."""


def kill_engine(folder: Path, pid: int) -> None:
    """Have the engine thread of that process die."""
    (folder / f"{pid}.die").touch()


def engine_thread(folder: Path, pid: int) -> int:
    """The kernel's number of the engine thread of that process."""
    return int((folder / f"{pid}.engine").read_text())


class Murderer(threading.Thread):
    """Tells who its victim is, waits for its file, raises once."""

    def __init__(self, victim: threading.Thread, folder: Path) -> None:
        """victim: the engine thread, which runs."""
        super().__init__(name="murderer", daemon=True)
        assert victim.ident is not None, "it runs"
        self._victim = victim.ident
        self._file = folder / f"{os.getpid()}.die"
        (folder / f"{os.getpid()}.engine").write_text(str(victim.native_id))

    def run(self) -> None:
        while not self._file.exists():
            time.sleep(_POLL_S)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._victim), ctypes.py_object(Unforeseen))
