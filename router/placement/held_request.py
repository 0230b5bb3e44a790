"""One request that waits at the router, and how it leaves. Values: decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cache.priority import lag_s
from cache.types import ReplicaId, RequestId
from router.placement.decision import Decision, Placement, RouteQuery


@dataclass(slots=True, eq=False)
class HeldRequest:
    """What is known of it; those who hold it keep it up to date. Times are the router's clock's."""

    query: RouteQuery
    since: float
    number: int  # in order of submission: ties go to whoever came first
    deadline: float  # inf = none
    order: float  # own prefill seconds + aging * (since + lag_s): the law's order, without the clock
    decision: Decision | None = None  # the latest
    weighed_at: float = float("-inf")  # when it was taken
    wants: ReplicaId | None = None  # the best replica then; None: nobody can take it
    free_at: float = float("-inf")  # when that one will be free
    engine_s: float = 0.0  # of the time of that replica; 0 while unknown
    ahead_s: float = 0.0  # of its time, for those that wait before this one; in `free_at`
    forsaken_at: float = math.inf  # when everybody who could take it was first seen to be leaving

    @property
    def request_id(self) -> RequestId:
        return self.query.request_id

    @property
    def tenant(self) -> str:
        return self.query.tenant

    @property
    def lag_s(self) -> float:
        """Seconds that it stands back among its tenant's requests."""
        return lag_s(self.query.priority)

    @property
    def uncached_tokens(self) -> int:
        """Of its prompt, to be computed where it would go now; all of them while nobody can take it."""
        cached = 0 if self.decision is None else self.decision.ranking.best_cached
        return self.query.num_prompt_tokens - cached


@dataclass(frozen=True, slots=True)
class Departure:
    """A request that is held no longer. Exactly one of `placement` and `error` is not None."""

    request_id: RequestId
    waited_s: float
    placement: Placement | None = None  # booked: whoever takes it must `release` it
    error: Exception | None = None  # NoReplica, AllBusy, DeadlineExceeded, ConfigError, or a bug
