"""One request that waits at the router, and how it leaves. Values: decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cache.errors import ServingError
from cache.types import ReplicaId, RequestId
from router.placement.decision import Decision, Placement, RouteQuery


@dataclass(slots=True, eq=False)
class HeldRequest:
    """What is known of it; those who hold it keep it up to date. Times are the router's clock's."""

    query: RouteQuery
    since: float
    number: int  # in order of submission: ties go to whoever came first
    deadline: float  # inf = none
    order: float  # own prefill seconds + aging * since: the law's order, without the clock
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


@dataclass(frozen=True, slots=True)
class Departure:
    """A request that is held no longer. Exactly one of `placement` and `error` is not None."""

    request_id: RequestId
    waited_s: float
    placement: Placement | None = None  # booked: whoever takes it must `release` it
    error: ServingError | None = None  # NoReplica, AllBusy, DeadlineExceeded or ConfigError
