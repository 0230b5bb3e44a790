"""One replica between two changes of its load: what a decision reads of it.

Knows seconds, requests and blocks; knows neither hashes nor how it came about (`replica_load.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from cache.events import Load, StepTimeModel
from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.pricing.cost import Price, step_left_s
from router.pricing.load_view import LoadView
from router.pricing.step_clock import UNKNOWN


class ReplicaState(NamedTuple):
    """One replica between two changes: what a decision reads, and what a `LoadView` is made from.

    Immutable, so that a decision can keep it as the record of what it saw.
    """

    replica_id: ReplicaId
    price: Price | None  # None while its speed is unknown
    silent_at: float  # from then on, unless it is heard before
    is_shut: bool  # full or draining, as long as it is not silent
    num_waiting: int  # in the engine's queue, or sent and not yet seen
    num_requests: int
    last_chosen: int
    num_in_flight: int
    queued_tokens: int
    used_fraction: float
    busy_until: float  # when it can start on a newcomer: behind the queue, and with a place
    first_at: float  # before then it starts nothing, whoever goes first there: it is late, or short of blocks
    slowness: float  # times as long as on a typical replica, of a step in which its sequences decode
    step_time: StepTimeModel | None
    load: Load
    info: ReplicaInfo

    def backlog_s(self, now: float) -> float:
        return max(0.0, self.busy_until - now)

    @property
    def decode_step_s(self) -> float:
        """What a step takes there without any prompt; 0 while nobody runs, or its speed is unknown."""
        return self.price.step_s if self.price is not None else 0.0

    def step_left_s(self, now: float) -> float | None:
        """Of the step that whoever is sent there now finds in progress; None: nobody knows."""
        if self.price is None or self.price.boundary_at == UNKNOWN:
            return None
        return step_left_s(self.price, now)

    def num_requests_at(self, now: float) -> int:
        # A silent one's report is stale: what this router has there now is the better guess.
        return self.num_requests if now <= self.silent_at else self.num_in_flight

    def behind(self, seconds: float, now: float) -> ReplicaState:
        """The same with so much more work before a newcomer, which nobody has sent there yet."""
        busy_until = max(now, self.busy_until) + seconds
        price = self.price
        if price is not None:
            price = price._replace(busy_until=max(now, price.busy_until) + seconds)
        return self._replace(busy_until=busy_until, price=price)

    def letting_by(self, price: Price, before_s: float, passed_s: float, now: float) -> ReplicaState:
        """The same, priced for a request that so much of its work goes before; what it passes waits so long.

        price: its own.
        """
        # As `_replace` of both does, in less than half of its time: a decision may ask every replica.
        met = tuple.__new__(Price, (now + before_s, *price[1:-1], passed_s))
        return tuple.__new__(ReplicaState, (self.replica_id, met, *self[2:]))

    def view(self, now: float) -> LoadView:
        load, info = self.load, self.info
        return LoadView(
            backlog_s=self.backlog_s(now),
            num_requests=self.num_requests_at(now),
            num_running=load.num_running,
            num_waiting=self.num_waiting,
            context_tokens=load.context_tokens,
            used_fraction=self.used_fraction,
            max_batched_tokens=info.max_batched_tokens,
            step_time=self.step_time,
            is_full=self.is_full(now),
            is_draining=load.is_draining,
            is_silent=now > self.silent_at,
            last_chosen=self.last_chosen,
            queued_tokens=self.queued_tokens,
            total_blocks=load.total_blocks,
            num_in_flight=self.num_in_flight,
            fleet_time=self.price.fleet_time if self.price is not None else None,
            regret=self.price.regret if self.price is not None else 0.0,
            uses_lost=self.price.uses_lost if self.price is not None else 0.0,
            alone_s=self.price.alone_s if self.price is not None else 0.0,
            step_left_s=self.step_left_s(now),
        )

    def is_full(self, now: float) -> bool:
        if now > self.silent_at:
            return self.num_in_flight >= self.info.max_running + self.info.max_waiting
        return is_full_by(self.load, self.info, self.num_requests)

    def is_shut_at(self, now: float) -> bool:
        """`is_shut`, also where it may be silent by now."""
        return self.load.is_draining or self.is_full(now)


def is_full_by(load: Load, info: ReplicaInfo, num_requests: int) -> bool:
    """It would refuse one more request."""
    return load.num_waiting >= max(1, info.max_waiting) or num_requests >= info.max_running + info.max_waiting
