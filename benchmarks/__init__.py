"""What is measured, each by `python -m benchmarks.<name>`."""

from __future__ import annotations

import sys
from types import TracebackType

_STOPPED = 130  # as `benchmarks.stopping` has it, which is not imported yet


def _tell_stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while a benchmark is still being imported, seconds where that is torch: a line, as later on."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("interrupted: nothing is kept\n")
    raise SystemExit(_STOPPED)


if sys.argv[0] == "-m":  # this package is imported for one of its modules to be run
    sys.excepthook = _tell_stopped
