"""Who may wait: the router's queue is bounded by time, so that whoever is taken in is served in time.

A queue bounded by requests is long or short as they are: 256 of 20 tokens are gone in a moment, 256 of
20,000 make everybody wait for minutes, and in overload that is how long all of them wait, for nothing: the
replicas are no busier with a long queue than with a short one. So a newcomer is refused when those before it
would keep the fleet busy for longer than `max_wait_s`, or until after its own deadline. It is the newcomer,
not somebody taken in earlier; and one whose replica could start on it at once need not ask.

That bound is for what passes: a batch, a hundred clients that begin together, a short peak. Where more
keeps coming than is served (`overload.py`) the queue would stand at it, and everybody who is taken in would
wait so long. So in overload the bound is `overload_wait_s`; if nobody has set that, as long as 95 of the
latest 100 prompts take to prefill: about what 99 of 100 requests wait for their first token while there is
room.

A refused client is told when there will be room: when the queue has run down to the bound, and those who
were told to come back earlier have been served. So they do not all return in the same second.

Pure and clock-driven. Knows seconds; knows neither replicas nor the order of those that wait.
Owner: the router's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from router.config import RouterConfig
from router.errors import AllBusy
from router.placement.overload import Overload
from router.placement.refused_work import RefusedWork
from router.pricing.recent_quantile import RecentQuantile

# The long prompts: 19 of 20 of the latest are no longer, and nothing is known of fewer than so many. (Of a
# heavy tail 99 of 100 is a number that jumps.)
LONG, OVER, LEAST = 0.95, 256, 32
LEAST_BOUND_S = 0.05  # what no client notices is no overload, however short the prompts are
# In overload nobody is let in behind more than the bound. It is none before the wait is so many times as
# long: the first of those times the latest who wait are served in time all the same.
LONG_WAIT = 2.0
RETRY_AFTER_RANGE_S = (1.0, 30.0)  # what a refused client is told to wait, at least and at most


@dataclass(frozen=True, slots=True)
class QueueState:
    """How long it is, and how long it may be."""

    wait_s: float  # until somebody could start on a newcomer; 0: at once
    bound_s: float  # a newcomer that would wait longer is refused; inf: nobody is
    is_overload: bool  # more kept coming than was served, not long ago


class Admission:
    """The bound, and when there will be room for those turned away."""

    def __init__(
        self, max_wait_s: float, clock: Callable[[], float], *, overload_wait_s: float | None = None
    ) -> None:
        """max_wait_s: inf = no bound but deadlines, in overload neither. overload_wait_s: None = as long as
        the longest prompts take."""
        self._max_wait_s = max_wait_s
        self._overload_wait_s = overload_wait_s
        self._clock = clock
        self._promised_until = -math.inf  # when those told to come back will have been served
        # Those who were told to come back have done so by then, and were not told again.
        self._overload = Overload(max_wait_s, quiet_s=RETRY_AFTER_RANGE_S[1] + max_wait_s)
        self._prefills_s = RecentQuantile(LONG, OVER)
        self._work = RefusedWork()

    @classmethod
    def of(cls, config: RouterConfig, clock: Callable[[], float]) -> Admission:
        return cls(max_wait_of(config), clock, overload_wait_s=config.overload_wait_s)

    @property
    def is_overload(self) -> bool:
        """More keeps coming than is served, or did when somebody came or was refused last, not long ago."""
        return self._overload.is_on(self._clock())

    @property
    def bound_s(self) -> float:
        """The longest wait, now. inf: none is too long."""
        return self._strict_s if self.is_overload else self._max_wait_s

    @property
    def refused_ratio(self) -> float:
        """Engine seconds refused lately, for each that was placed (`RefusedWork`)."""
        return self._work.ratio

    def state(self, wait_s: float) -> QueueState:
        """For metrics. wait_s: a newcomer's."""
        return QueueState(wait_s, self.bound_s, self.is_overload)

    def came(
        self, prefill_s: float, *, num_waiting: float, wait_s: float, num_replicas: int, part: float = 1.0
    ) -> None:
        """Somebody new, before it is asked whether there is room. Once per request.

        prefill_s: its own, alone on its replica; 0 while speeds are unknown. num_waiting: here, before it.
        num_replicas: that take new requests. part: of its HTTP request.
        """
        if prefill_s > 0.0:
            self._prefills_s.add(prefill_s)
        if self._max_wait_s < math.inf:
            self._overload.look(
                self._clock(),
                num_waiting,
                wait_s,
                part,
                num_replicas=num_replicas,
                long_wait_s=LONG_WAIT * self._strict_s,
            )

    def placed(self, engine_s: float) -> None:
        """Somebody goes to a replica, and takes so much of its time."""
        self._work.placed(engine_s, self._clock())

    def not_taken(self, engine_s: float) -> None:
        """The engine that it went to had no room for it, and did nothing for it."""
        self._work.not_taken(engine_s, self._clock())

    def given_up(self, engine_s: float) -> None:
        """Its client is told so: nobody else had room either."""
        self._work.refused(engine_s, self._clock())

    @property
    def _strict_s(self) -> float:
        """The bound in overload."""
        if self._overload_wait_s is not None:
            return min(self._overload_wait_s, self._max_wait_s)
        if len(self._prefills_s) < LEAST:
            return self._max_wait_s
        return min(max(self._prefills_s.value, LEAST_BOUND_S), self._max_wait_s)

    def check(
        self,
        *,
        wait_s: float,
        ahead_s: float,
        own_s: float,
        deadline: float,
        num_replicas: int,
        part: float = 1.0,
        is_within_share: bool = False,
    ) -> None:
        """Raises AllBusy for who should not wait.

        wait_s: behind everybody who is here. ahead_s: behind those who go before this one, at most as long.
        own_s: of engine time for its prefill. deadline: by the clock; inf = none.
        is_within_share: it is not its tenant that asks for too much: no overload is of its making.
        """
        now = self._clock()
        bound_s = self._max_wait_s if is_within_share else self.bound_s
        if wait_s > bound_s:
            raise self.refusal(wait_s - bound_s, own_s, num_replicas, part)
        left_s = deadline - now
        # One that is too late already is told so, by whoever keeps the deadlines.
        if ahead_s > 0.0 and 0.0 < left_s < ahead_s + own_s:
            room_in_s = ahead_s + own_s - left_s
            if own_s > left_s:  # too late on an idle replica, too: not work that one more would do
                raise self._turned_away(room_in_s, own_s, num_replicas, part)
            raise self.refusal(room_in_s, own_s, num_replicas, part)

    def refusal(self, room_in_s: float, own_s: float, num_replicas: int, part: float = 1.0) -> AllBusy:
        """What to tell somebody for whom there will be room after so many seconds, if nobody comes.

        own_s: of engine time, that would be done were there room.
        """
        self._work.refused(own_s, self._clock())
        return self._turned_away(room_in_s, own_s, num_replicas, part)

    def _turned_away(self, room_in_s: float, own_s: float, num_replicas: int, part: float) -> AllBusy:
        now = self._clock()
        self._overload.refused(now, part)
        least, most = RETRY_AFTER_RANGE_S
        room_at = min(max(now + room_in_s, self._promised_until), now + most)
        self._promised_until = room_at + own_s / num_replicas
        return AllBusy(num_replicas, retry_after_s=max(room_at - now, least))


def max_wait_of(config: RouterConfig) -> float:
    """Seconds; inf = no bound."""
    return math.inf if config.max_wait_s is None else config.max_wait_s
