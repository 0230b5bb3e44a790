"""A replica's last seconds: routers hear of them at once, and nobody's stream ends with the process.

    staying ──(its host says when it will be killed)──> draining ──(shortly before that)──> handed over

Draining it finishes what it has. What is still running when time is short goes back to its router, which has
another replica go on with it: cheaper and quieter than being cut off.
Knows an engine and a clock; whoever hosts the replica tells how long it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from replica.polling import Poller

POLL_S = 0.05  # between two looks at whether it is to leave: routers must know within a second
# Before it is killed: what is handed over has to get out, and Serve looks once a second whether it has.
HAND_OVER_BEFORE_S = 3.0
HAND_OVER_SHARE = 1 / 3  # but at most this part of the time it was given

logger = logging.getLogger(__name__)


class Leaving(Protocol):
    """What is asked of the engine. Any thread; never blocks."""

    def drain(self) -> None:
        """Tell routers to send nothing new."""

    def hand_over(self) -> None:
        """Give back what is in flight."""


class Departure:
    """Watches for the end from a thread of its own; a test calls `check`."""

    def __init__(
        self,
        engine: Leaving,
        given_s: Callable[[], float | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """given_s: seconds the replica has from the moment it is told to leave; None while it may stay."""
        self._engine = engine
        self._given_s = given_s
        self._clock = clock
        self._hand_over_at: float | None = None  # None: nobody has said that it is to leave
        self._has_handed_over = False
        self._poller = Poller("warmpath-departure", POLL_S, self.check)

    def start(self) -> None:
        self._poller.start()

    def close(self) -> None:
        """Stop watching. May be called twice, and before `start`."""
        self._poller.close()

    def check(self) -> None:
        """Act on what has changed since the last call."""
        if self._hand_over_at is None:
            given_s = self._given_s()
            if given_s is None:
                return
            self._hand_over_at = self._clock() + given_s - min(HAND_OVER_BEFORE_S, HAND_OVER_SHARE * given_s)
            logger.info("draining", extra={"given_s": given_s})
            self._engine.drain()
        if not self._has_handed_over and self._clock() >= self._hand_over_at:
            self._has_handed_over = True
            self._engine.hand_over()
