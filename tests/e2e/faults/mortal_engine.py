"""An engine thread that dies when told to, of an error that nothing in its code has foreseen, wherever it is.

Nothing outside of a process can raise in one of its threads; so a thread beside it does, when the test has
written a file. Knows the interpreter; of the engine it knows its thread's number.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

_POLL_S = 0.02


class Unforeseen(BaseException):
    """No `except Exception` takes it for a failed forward."""


def kill_engine(folder: Path, pid: int) -> None:
    """Have the engine thread of that process die."""
    (folder / f"{pid}.die").touch()


class Murderer(threading.Thread):
    """Waits for its file, raises once."""

    def __init__(self, victim: int, folder: Path) -> None:
        """victim: the engine thread's `threading` identifier."""
        super().__init__(name="murderer", daemon=True)
        self._victim = victim
        self._file = folder / f"{os.getpid()}.die"

    def run(self) -> None:
        never = threading.Event()  # whoever looks for the engine by its `time.sleep` must not find this one
        while not self._file.exists():
            never.wait(_POLL_S)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._victim), ctypes.py_object(Unforeseen))
