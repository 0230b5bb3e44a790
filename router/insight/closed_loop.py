"""What the index expected against what the engines found, request by request; and what follows from it.

The prompt that was expected in vain needs no correction: by its first token the engine has computed it. But
an engine that keeps delivering less than it has itself announced is doubted: a snapshot replaces what is
indexed of it. Digests find an index that has drifted from the events; this finds events that have
drifted from the engine. A wrong guess of the router's own is no reason for doubt: it ends by itself
(`expectations.py`). An imitated cache is measured and not corrected: made smaller by what was found
evicted it is right more often, and in overload requests wait longer (`docs/design/005-index.md`).

Blocks evicted between decision and admission look the same, so one miss says nothing, and a replica is
doubted at most every `MIN_DOUBT_INTERVAL_S`, twice as long after every doubt that did not help: neither
churn nor a client that provokes misses can make the fleet send snapshots all day.

Knows tokens and replicas; knows neither sockets nor what a snapshot is. Owner: the router's event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cache.types import ReplicaId
from router.insight.accounting import TokenAccount
from router.placement.decision import DecisionRecord

ERROR_BOUNDS = (
    0,
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
)  # blocks; upper ends of the histogram's buckets
RECENT = 1000  # requests behind `share_within_one`

DOUBT_WINDOW = 32  # requests of one replica with a match it had announced itself
DOUBT_MISSES = 8  # of them, found more than a block short
MIN_DOUBT_INTERVAL_S = 30.0
MAX_DOUBT_INTERVAL_S = 1800.0


@dataclass(slots=True)
class _Trust:
    """One replica's record of keeping its word."""

    misses: deque[bool] = field(default_factory=lambda: deque(maxlen=DOUBT_WINDOW))
    interval_s: float = MIN_DOUBT_INTERVAL_S
    doubted_at: float = float("-inf")


@dataclass(slots=True)
class LoopTotals:
    """Sums since the start, over requests whose replica's cache was followed."""

    requests: int = 0
    error_blocks: int = 0  # sum of |expected - found|
    by_bound: list[int] = field(
        default_factory=lambda: [0] * (len(ERROR_BOUNDS) + 1)
    )  # last: above all bounds
    missing_exact: int = 0  # tokens that the replica had announced and did not find
    missing_predicted: int = 0  # tokens that the router had guessed it would have
    unexpected: int = 0  # tokens found that nobody expected
    doubts: int = 0  # snapshots asked for

    @property
    def within_one_block(self) -> int:
        return sum(self.by_bound[:2])


class ClosedLoop:
    """Hears every account; asks for snapshots. O(1) per request."""

    def __init__(
        self, block_size: int, *, clock: Callable[[], float], doubt: Callable[[ReplicaId], None]
    ) -> None:
        """doubt: asks for a snapshot of that replica; does not block."""
        self.totals = LoopTotals()
        self._block_size = block_size
        self._clock = clock
        self._doubt = doubt
        self._trust: dict[ReplicaId, _Trust] = {}
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._num_recent_within = 0

    @property
    def share_within_one(self) -> float:
        """Of the last `RECENT` requests, those whose match was right to within one block; 1 before any."""
        return self._num_recent_within / len(self._recent) if self._recent else 1.0

    def heard(self, account: TokenAccount, record: DecisionRecord) -> None:
        """A request's first token came. Ignored if its replica's cache is not followed."""
        replica_id = account.replica_id
        if replica_id in record.ranking.unmatched or not _was_candidate(record, replica_id):
            return
        exact = record.exact_tokens if replica_id == record.replica_id else 0
        self._count(account, exact)
        if exact:
            self._judge(replica_id, exact - account.delivered)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._trust.pop(replica_id, None)

    def _count(self, account: TokenAccount, exact: int) -> None:
        totals, missing = self.totals, account.captured - account.delivered
        error = -(-abs(missing) // self._block_size)
        totals.requests += 1
        totals.error_blocks += error
        totals.by_bound[bisect_left(ERROR_BOUNDS, error)] += 1
        missing_exact = max(0, min(exact, account.captured) - account.delivered)
        totals.missing_exact += missing_exact
        totals.missing_predicted += max(0, missing) - missing_exact
        totals.unexpected += max(0, -missing)
        if len(self._recent) == RECENT:
            self._num_recent_within -= self._recent[0]
        self._recent.append(error <= 1)
        self._num_recent_within += error <= 1

    def _judge(self, replica_id: ReplicaId, missing: int) -> None:
        trust = self._trust.setdefault(replica_id, _Trust())
        trust.misses.append(missing > self._block_size)
        if sum(trust.misses) < DOUBT_MISSES:
            return
        now = self._clock()
        since_s = now - trust.doubted_at
        if since_s < trust.interval_s:
            return
        # A doubt long after the last one is a new trouble, not the old one unhelped.
        has_helped = since_s > 4 * trust.interval_s
        trust.interval_s = (
            MIN_DOUBT_INTERVAL_S if has_helped else min(2 * trust.interval_s, MAX_DOUBT_INTERVAL_S)
        )
        trust.doubted_at = now
        trust.misses.clear()
        self.totals.doubts += 1
        self._doubt(replica_id)


def _was_candidate(record: DecisionRecord, replica_id: ReplicaId) -> bool:
    return record.replica_id == replica_id or any(
        [state.replica_id == replica_id for state in record.ranking.states]
    )
