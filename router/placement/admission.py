"""Who may wait: the router's queue is bounded by time, so that whoever is taken in is served in time.

A queue bounded by requests is long or short as they are: 256 of 20 tokens are gone in a moment, 256 of
20,000 make everybody wait for minutes, and in overload that is how long all of them wait, for nothing: the
replicas are no busier with a long queue than with a short one. So a newcomer is refused when those before it
would keep the fleet busy for longer than `max_wait_s`, or until after its own deadline. It is the newcomer,
never somebody taken in earlier; and one whose replica could start on it at once need not ask.

A refused client is told when there will be room: when the queue has run down to the bound, and those who
were told to come back earlier have been served. So they do not all return in the same second.

Pure and clock-driven. Knows seconds; knows neither replicas nor the order of those that wait.
Owner: the router's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from router.errors import AllBusy

RETRY_AFTER_RANGE_S = (1.0, 30.0)  # what a refused client is told to wait, at least and at most


class Admission:
    """The bound, and when there will be room for those turned away."""

    def __init__(self, max_wait_s: float, clock: Callable[[], float]) -> None:
        """max_wait_s: inf = no bound but deadlines."""
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._promised_until = -math.inf  # when those told to come back will have been served

    def check(
        self, *, wait_s: float, ahead_s: float, own_s: float, deadline: float, num_replicas: int
    ) -> None:
        """Raises AllBusy for who should not wait.

        wait_s: behind everybody who is here. ahead_s: behind those who go before this one, at most as long.
        own_s: of engine time for its prefill. deadline: by the clock; inf = none.
        """
        now = self._clock()
        if wait_s > self._max_wait_s:
            raise self.refusal(wait_s - self._max_wait_s, own_s, num_replicas)
        left_s = deadline - now
        # One that is too late already is told so, by whoever keeps the deadlines.
        if ahead_s > 0.0 and 0.0 < left_s < ahead_s + own_s:
            raise self.refusal(ahead_s + own_s - left_s, own_s, num_replicas)

    def refusal(self, room_in_s: float, own_s: float, num_replicas: int) -> AllBusy:
        """What to tell somebody for whom there will be room after so many seconds, if nobody comes."""
        now = self._clock()
        least, most = RETRY_AFTER_RANGE_S
        room_at = min(max(now + room_in_s, self._promised_until), now + most)
        self._promised_until = room_at + own_s / num_replicas
        return AllBusy(num_replicas, retry_after_s=max(room_at - now, least))
