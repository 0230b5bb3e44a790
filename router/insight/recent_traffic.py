"""What the last minutes were like: times to first token, hits, and why tokens were computed, by time.

    RecentTraffic ── 150 slots of 2 s, 120 slots of 30 s ──> a series and its sums, for each of the two spans

A slot counts first tokens in it by logarithmic buckets, so a percentile is right to within `ERROR`. Slots are
reused in a ring: memory is bounded by their number, whatever the traffic.

Knows seconds and token counts; knows neither prompts nor replicas. Owner: the router's event loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache.types import HashHint, ReplicaId, RequestId
from router.insight.accounting import TokenAccount, UncachedReason
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver

SPANS = ((2.0, 150), (30.0, 120))  # (seconds of a slot, slots): five minutes, and an hour

LEAST_S, MOST_S = 0.001, 1000.0  # what is faster or slower counts as that
GROWTH = 1.1  # of a bucket's upper end over its lower one
ERROR = math.sqrt(GROWTH) - 1.0  # of a percentile, relative, at most
_LOG_GROWTH = math.log(GROWTH)


@dataclass(slots=True)
class Tally:
    """First tokens of some stretch of time."""

    requests: int = 0
    prompt: int = 0  # tokens of their prompts
    available: int = 0  # of those, cached anywhere in the fleet
    delivered: int = 0  # of those, taken from a cache
    uncached: Counter[UncachedReason] = field(default_factory=Counter)  # tokens
    buckets: Counter[int] = field(default_factory=Counter)  # requests by time to first token

    def add(self, other: Tally) -> None:
        self.requests += other.requests
        self.prompt += other.prompt
        self.available += other.available
        self.delivered += other.delivered
        for reason, tokens in other.uncached.items():
            self.uncached[reason] += tokens
        for bucket, requests in other.buckets.items():
            self.buckets[bucket] += requests

    def account(self, account: TokenAccount) -> None:
        self.prompt += account.prompt
        self.available += account.available
        self.delivered += account.delivered
        for reason, tokens in account.uncached.items():
            self.uncached[reason] += tokens

    def quantiles(self, *wanted: float) -> tuple[float | None, ...]:
        """Times to first token, seconds; wanted: 0..1, ascending. None of nothing."""
        count = sum(self.buckets.values())
        if not count:
            return (None,) * len(wanted)
        ordered = sorted(self.buckets.items())
        found: list[float | None] = []
        seen, index = 0, -1
        for quantile in wanted:
            while seen < max(1, math.ceil(quantile * count)):
                index += 1
                seen += ordered[index][1]
            found.append(LEAST_S * math.exp((ordered[index][0] + 0.5) * _LOG_GROWTH))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Point:
    """One slot of a series."""

    requests: int
    p50_s: float | None  # time to first token; None: there was none
    p99_s: float | None
    prompt: int  # tokens
    delivered: int


@dataclass(frozen=True, slots=True)
class Span:
    """The latest stretch of time, up to now."""

    step_s: float  # of one point
    num_slots: int  # points there are once the Router has run that long
    since_start_s: float  # the last point's end, seconds since the Router started; it is not over yet
    points: Sequence[Point]  # oldest first, from the Router's start on
    total: Tally


_NOTHING = Point(0, None, None, 0, 0)


class _Ring:
    """The latest slots of one length."""

    def __init__(self, step_s: float, num_slots: int, started_at: float) -> None:
        self.step_s = step_s
        self.num_slots = num_slots
        self._started_at = started_at
        self._slots: dict[int, Tally] = {}  # by number, those that were not silent, oldest first
        self._closed: dict[int, Point] = {}  # of slots that are over

    def slot(self, now: float) -> Tally:
        """The one that `now` lies in."""
        number = self._number(now)
        slot = self._slots.get(number)
        if slot is None:
            self._forget(number)
            slot = self._slots[number] = Tally()
        return slot

    def span(self, now: float) -> Span:
        """O(slots)."""
        last = self._number(now)
        self._forget(last)
        total = Tally()
        for slot in self._slots.values():
            total.add(slot)
        first = max(0, last - self.num_slots + 1)
        points = [self._point(number, last) for number in range(first, last + 1)]
        return Span(self.step_s, self.num_slots, (last + 1) * self.step_s, points, total)

    def _point(self, number: int, last: int) -> Point:
        slot = self._slots.get(number)
        if slot is None:
            return _NOTHING
        point = self._closed.get(number)
        if point is None:
            p50_s, p99_s = slot.quantiles(0.5, 0.99)
            point = Point(slot.requests, p50_s, p99_s, slot.prompt, slot.delivered)
            if number < last:
                self._closed[number] = point
        return point

    def _number(self, now: float) -> int:
        return max(0, int((now - self._started_at) // self.step_s))

    def _forget(self, last: int) -> None:
        """What is too old to be shown at slot `last`."""
        for number in [number for number in self._slots if number <= last - self.num_slots]:
            del self._slots[number]
            self._closed.pop(number, None)


class RecentTraffic(SilentObserver):
    """Hears decisions, first tokens and accounts. O(1) per request."""

    def __init__(self, *, clock: Callable[[], float], spans: Sequence[tuple[float, int]] = SPANS) -> None:
        """spans: seconds of a slot, and how many of them are kept."""
        self._clock = clock
        started_at = clock()
        self._rings = [_Ring(step_s, num_slots, started_at) for step_s, num_slots in spans]
        self._asked_at: dict[RequestId, float | None] = {}  # until finished; None after the first token

    @property
    def num_open(self) -> int:
        return len(self._asked_at)

    def span(self, index: int) -> Span:
        """The latest of that span. O(slots)."""
        return self._rings[index].span(self._clock())

    def accounted(self, account: TokenAccount, record: DecisionRecord) -> None:
        """Told with the first token."""
        now = self._clock()
        for ring in self._rings:
            ring.slot(now).account(account)

    # --- RoutingObserver ----------------------------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        asked_at = query.asked_at if query.asked_at is not None else record.decided_at
        self._asked_at.setdefault(query.request_id, asked_at)

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        asked_at = self._asked_at.get(request_id)
        if asked_at is None:
            return  # of a stream that goes on elsewhere, it is not the first
        self._asked_at[request_id] = None
        now = self._clock()
        bucket = bucket_of(now - asked_at)
        for ring in self._rings:
            slot = ring.slot(now)
            slot.requests += 1
            slot.buckets[bucket] += 1

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self._asked_at.pop(request_id, None)


def bucket_of(seconds: float) -> int:
    """The bucket of `Tally.buckets` that a time falls into."""
    return int(math.log(min(max(seconds, LEAST_S), MOST_S) / LEAST_S) / _LOG_GROWTH)
