"""Ctrl-C as the end of a benchmark: a line, and the status that shells give it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

STOPPED = 130


def stoppable(main: Callable[[], int], kept: str = "nothing is kept") -> int:
    """What `main` returns; STOPPED after Ctrl-C, and what is kept of what was measured until then."""
    try:
        return main()
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: {kept}\n")
        return STOPPED


@contextlib.contextmanager
def ctrl_c_is_ours() -> Iterator[None]:
    """What is started inside does not get it: whoever started it ends it.

    A terminal sends it to all of them, and a process that is only told here what to ignore would have begun
    with a traceback. One that comes inside is raised at the end.
    """
    outside = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, outside)
