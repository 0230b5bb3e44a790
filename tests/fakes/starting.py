"""Commands that begin with the signals they are told to have, whatever the tests themselves began with.

The new process sets them itself: what `subprocess` runs in between is a copy of the tests' whole memory.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

_SET = """
import fcntl, os, signal, sys, termios
for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_DFL)
if sys.argv[1]:
    signal.signal(int(sys.argv[1]), signal.SIG_IGN)
if sys.argv[2]:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[3], sys.argv[3:])
"""


def beginning(
    command: Sequence[str], *, ignored: signal.Signals | None = None, has_terminal: bool = False
) -> list[str]:
    """What starts `command`, a path and its arguments, with the usual signals but for the one ignored.

    has_terminal: its standard input, a terminal, is its session's; it has to lead one (`start_new_session`).
    """
    number = "" if ignored is None else str(int(ignored))
    return [sys.executable, "-c", _SET, number, "1" if has_terminal else "", *command]
