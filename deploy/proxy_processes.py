"""The HAProxy processes of one run folder: Serve's proxy starts them, each in a session of its own.

Where that one is killed they listen on, with nobody behind them. Knows `/proc`; knows nothing of Serve.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PROGRAM = "haproxy"
POLL_S = 0.05


def end_proxies(run_folder: Path, limit_s: float = 5.0) -> None:
    """End those that still run, when nobody needs their answers; waits for their end, at most `limit_s`.

    A process is known by its program and by the file it was started with, so that no other is hit.
    """
    deadline = time.monotonic() + limit_s
    while (left := list(_running(run_folder))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _running(run_folder: Path) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours to look at
            if _is_proxy((entry / "cmdline").read_bytes().decode(errors="replace").split("\0"), run_folder):
                yield int(entry.name)


def _is_proxy(arguments: list[str], run_folder: Path) -> bool:
    # The first two: `sh` and the wrapper, until that has become the program.
    is_program = any(Path(each).name == PROGRAM for each in arguments[:2])
    files = [value for option, value in pairwise(arguments) if option == "-f"]
    return is_program and any(Path(each).is_relative_to(run_folder) for each in files)
