"""When a slow replica that nobody uses is given another chance.

A replica may have measured itself while others had its cores, or while it was stopped. Nobody goes to who is
ten times slower, so it would measure nothing, and never be found quick again. After some seconds without work
one request may go there as if it were quick; what it says then counts again.

Knows times alone; knows neither fits nor names.
"""

from __future__ import annotations

AFTER_S = 10.0  # so long slow and without work: it may have changed unseen
MOST_AFTER_S = 160.0  # twice as long after each trial, up to this: a few requests an hour for a slow machine


class Trial:
    """Of one slow replica: open from when it has been idle for long enough until a request goes there."""

    __slots__ = ("_after_s", "_idle_since", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._after_s = AFTER_S
        self._idle_since: float | None = None

    def idle(self, now: float) -> None:
        """It has no work, and is there."""
        if self._idle_since is None:
            self._idle_since = now
        self.is_open = now >= self._idle_since + self._after_s

    def busy(self) -> None:
        """It has work. The first of it is what it is tried with, whoever sent it."""
        if self.is_open:
            self._after_s = min(2.0 * self._after_s, MOST_AFTER_S)
        self._idle_since, self.is_open = None, False
