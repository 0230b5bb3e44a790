"""The signals that stop a service: Ctrl-C, a supervisor's, and that of a terminal that is gone."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def catch(handler: Callable[[int, FrameType | None], object]) -> None:
    """Hand all of them to `handler`, also in the background, where SIGINT is ignored. SIGHUP stays ignored
    where it is: that is what `nohup` asks for. Main thread only."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for signum in SIGNALS:
        if not (signum == signal.SIGHUP and is_nohup):
            signal.signal(signum, handler)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A handler: KeyboardInterrupt once. Those that follow change nothing: what is being stopped has to be
    stopped."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if signum == signal.SIGHUP:
        _leave_terminal()
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Each word to a terminal that is gone raises an error, which would end what stops all the rest. (Asked
    whether it is one, a terminal that is gone says no.)"""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)
