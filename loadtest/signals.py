"""SIGTERM and SIGHUP as Ctrl-C: whoever ends a process that started others ends these with it, and they leave
that to it.

Knows signals and terminals; what is stopped on Ctrl-C, and what is kept, is its callers' affair.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

_STREAMS = (1, 2)


def stop_on_signals() -> None:
    """From now on SIGTERM and SIGHUP do what Ctrl-C does, the first of them. Main thread only.

    SIGINT is not ignored any more, as it is in a background job: it is what the others become. SIGHUP stays
    ignored where it was: `nohup` asks for that.
    """
    # As Python has it: asyncio replaces only this one, and then cancels in place of raising anywhere.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminals = [stream for stream in _STREAMS if os.isatty(stream)]

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP):
            # A terminal that closes says so more than once; what is being stopped is not to be left half-way.
            signal.signal(each, lambda *_: None)
        for stream in terminals:
            if not os.isatty(
                stream
            ):  # hung up: what is printed now would raise, and the report not be written
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), stream)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started inside never hear SIGINT and SIGHUP, which a terminal sends to all: they are to be
    ended by whoever started them."""
    resource_tracker.ensure_running()  # when it starts it unblocks SIGINT here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
