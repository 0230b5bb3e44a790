"""One thread of another process stopped while the others run: what a hung forward looks like from outside.

A signal stops whole processes; a debugger stops one thread. So this is a debugger's first two steps, through
libc's ptrace. Needs to be allowed to trace (root, or an ancestor where Yama asks for that). Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_SLEEPS = {"x86_64": "230", "aarch64": "115"}  # clock_nanosleep: what a simulated step does

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def is_sleeping(thread_id: int) -> bool:
    """Whether it is in `time.sleep`, as a simulated engine inside a step; also while it is stopped there."""
    with contextlib.suppress(OSError):
        system_call = Path(f"/proc/{thread_id}/syscall").read_text().split()[0]
        return system_call == _SLEEPS[os.uname().machine]
    return False


@contextlib.contextmanager
def stopped_thread(thread_id: int) -> Iterator[None]:
    """The thread stands still until the end of the block, unless its process ends before.

    From one thread of ours: the tracer is a thread. Raises OSError where tracing is not allowed.
    """
    _ptrace(_SEIZE, thread_id)
    _ptrace(_INTERRUPT, thread_id)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has ended
            os.waitpid(thread_id, os.WNOHANG | _WALL)
            _ptrace(_DETACH, thread_id)


_WALL, _DETACH = 0x40000000, 17


def _ptrace(request: int, thread_id: int) -> None:
    if _libc.ptrace(request, thread_id, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
