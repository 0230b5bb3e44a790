"""How busy each replica is, as one router knows it: what the engine last said, and what this router has
sent it since.

An engine names the requests it has taken in with every batch, so a reservation counts only until then:
each router adds what the engine has not seen yet, and many routers agree without talking. Between
reports the backlog is a clock that runs down.

    reserve ──> unseen ──(named in `admitted`, or moved on, or too old)──> seen ──> release
                  └────────────────────────(call ended first)─────────────────────────┘

Knows tokens, seconds and replica names; knows neither hashes nor which replica is best.
Owner: the router's event loop; not thread-safe. Time comes in by the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cache.events import Load, StepTimeModel
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId


class LoadView(NamedTuple):
    """One replica's load at one moment: everything a decision may look at."""

    backlog_s: float  # prefill ahead of a new request; 0 while `step_time` is unknown
    num_requests: int  # running, waiting, and sent but not yet seen by the engine
    num_running: int
    num_waiting: int  # in the engine's queue, or sent and not yet seen
    context_tokens: int  # of all running sequences
    used_fraction: float  # of blocks, by running sequences and by what was sent; 0..1
    max_batched_tokens: int
    step_time: StepTimeModel | None  # None until the engine has measured itself
    is_full: bool  # it would refuse one more request
    is_draining: bool
    is_silent: bool  # nothing heard for too long: its cache is unknown, its load a guess
    last_chosen: int  # number of the decision that last chose it; 0 = never. Spreads ties evenly
    queued_tokens: int  # uncached prompt tokens in the engine's queue, or sent and not yet seen
    total_blocks: int  # of its cache
    num_in_flight: int  # sent by this router and not over


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request's claim on one replica, until the engine itself counts it."""

    request_id: RequestId
    uncached_tokens: int
    cached_tokens: int
    num_blocks: int  # blocks its uncached tokens will take
    made_at: float  # seconds, the clock's


class ReplicaLoad:
    """One replica's latest report and this router's reservations it does not contain yet."""

    def __init__(self, replica_id: ReplicaId, info: ReplicaInfo, now: float) -> None:
        self.replica_id = replica_id
        self.info = info
        self.last_heard_at = now  # a new replica has the benefit of the doubt
        self.last_chosen = 0
        self.num_in_flight = 0  # of this router
        self._load = Load(free_blocks=info.num_blocks, total_blocks=info.num_blocks)
        self._step_time: StepTimeModel | None = None
        self._unseen: dict[RequestId, Reservation] = {}  # oldest first
        self._unseen_blocks = 0
        self._unseen_tokens = 0
        self._busy_until = now  # when today's backlog will have been prefilled

    @property
    def load(self) -> Load:
        return self._load

    @property
    def num_unseen(self) -> int:
        return len(self._unseen)

    def report(self, load: Load, now: float) -> None:
        """The engine's own account replaces ours; reservations it does not name stay on top of it."""
        self.last_heard_at = now
        self._load = load
        self._step_time = _sane(load.step_time)
        for request_id in load.admitted:
            self._forget(request_id)
        self._busy_until = now + self._queued_s() + sum(map(self._prefill_s, self._unseen.values()))

    def reserve(self, reservation: Reservation, now: float) -> None:
        self._unseen[reservation.request_id] = reservation
        self._unseen_blocks += reservation.num_blocks
        self._unseen_tokens += reservation.uncached_tokens
        self._busy_until = max(now, self._busy_until) + self._prefill_s(reservation)

    def drop(self, request_id: RequestId) -> None:
        """The request did not come after all, or is over. Nothing happens if the engine has seen it."""
        reservation = self._forget(request_id)
        if reservation is not None:
            self._busy_until -= self._prefill_s(reservation)

    def expire(self, made_before: float) -> int:
        """Drop reservations older than that; how many. The oldest come first, so this stops early."""
        dropped = 0
        while self._unseen:
            reservation = next(iter(self._unseen.values()))
            if reservation.made_at >= made_before:
                break
            self.drop(reservation.request_id)
            dropped += 1
        return dropped

    def view(self, now: float, silent_after_s: float) -> LoadView:
        # Once per replica and decision, so written for speed.
        load, unseen = self._load, len(self._unseen)
        backlog_s = self._busy_until - now
        is_silent = now - self.last_heard_at > silent_after_s
        num_requests = load.num_running + load.num_waiting + unseen
        if is_silent:  # the report is stale; what this router has there now is the better guess
            num_requests = self.num_in_flight
        return LoadView(
            backlog_s=backlog_s if backlog_s > 0.0 else 0.0,
            num_requests=num_requests,
            num_running=load.num_running,
            num_waiting=load.num_waiting + unseen,
            context_tokens=load.context_tokens,
            used_fraction=self._used_fraction(),
            max_batched_tokens=self.info.max_batched_tokens,
            step_time=self._step_time,
            is_full=(not is_silent and load.num_waiting >= max(1, self.info.max_waiting))
            or num_requests >= self.info.max_running + self.info.max_waiting,
            is_draining=load.is_draining,
            is_silent=is_silent,
            last_chosen=self.last_chosen,
            queued_tokens=load.queued_uncached_tokens + self._unseen_tokens,
            total_blocks=load.total_blocks,
            num_in_flight=self.num_in_flight,
        )

    def _forget(self, request_id: RequestId) -> Reservation | None:
        reservation = self._unseen.pop(request_id, None)
        if reservation is not None:
            self._unseen_blocks -= reservation.num_blocks
            self._unseen_tokens -= reservation.uncached_tokens
        return reservation

    def _used_fraction(self) -> float:
        total = self._load.total_blocks
        if not total:
            return 0.0
        used = total - self._load.free_blocks + self._unseen_blocks
        return used / total if 0 < used < total else float(used > 0)

    def _prefill_s(self, reservation: Reservation) -> float:
        uncached, cached = reservation.uncached_tokens, reservation.cached_tokens
        return self._share_s(uncached, uncached * (cached + uncached / 2), 1)

    def _queued_s(self) -> float:
        """Seconds to prefill what the engine has queued, taken as prompts of equal length."""
        tokens, prompts = self._load.queued_uncached_tokens, max(1, self._load.num_waiting)
        return self._share_s(tokens, tokens * tokens / (2 * prompts), prompts) if tokens else 0.0

    def _share_s(self, tokens: int, attention: float, sequences: int) -> float:
        """Seconds of engine time for so much prefill among other work; 0 while its speed is unknown.

        Of a step's fixed cost it takes the share of its tokens: small prompts run together in one step,
        and to charge each of them a whole one would drive twins away from where their prefix is.
        """
        model = self._step_time
        if model is None:
            return 0.0
        idle_share = 1.0 - tokens / self.info.max_batched_tokens
        return model.step_s(tokens, attention, sequences) - model.base_s * idle_share


class FleetLoad:
    """Every replica's load, and where each of this router's requests is booked."""

    def __init__(
        self, clock: Callable[[], float], *, reservation_ttl_s: float, silent_after_s: float
    ) -> None:
        self._clock = clock
        self._reservation_ttl_s = reservation_ttl_s
        self._silent_after_s = silent_after_s
        self._replicas: dict[ReplicaId, ReplicaLoad] = {}
        # In-flight requests and where they are; the value may be a replica that has gone since.
        self._placed: dict[RequestId, ReplicaLoad] = {}
        self._seen_by: dict[RequestId, ReplicaId] = {}  # in-flight requests an engine has named
        self._num_chosen = 0

    def add_replica(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._replicas[replica_id] = ReplicaLoad(replica_id, info, self._clock())

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Its requests stay in flight until they are released or routed elsewhere."""
        self._replicas.pop(replica_id, None)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._replicas

    def __getitem__(self, replica_id: ReplicaId) -> ReplicaLoad:
        return self._replicas[replica_id]

    @property
    def num_in_flight(self) -> int:
        return len(self._placed)

    def report(self, replica_id: ReplicaId, load: Load) -> None:
        """A replica's account of itself. Ids it names are booked nowhere any more, whoever took them."""
        for request_id in load.admitted:
            placed = self._placed.get(request_id)
            if placed is None:
                continue  # another router's, or over already
            self._seen_by[request_id] = replica_id
            placed.drop(request_id)
        self._replicas[replica_id].report(load, self._clock())

    def reserve(self, replica_id: ReplicaId, reservation: Reservation) -> None:
        """Book a request on a replica, instead of wherever it was booked before."""
        self.release(reservation.request_id)
        self._num_chosen += 1
        self._replicas[replica_id].last_chosen = self._num_chosen
        self._book(replica_id, reservation)

    def move(self, replica_id: ReplicaId, reservation: Reservation) -> None:
        """The request went to this replica: book it there, unless its engine has named it already."""
        request_id = reservation.request_id
        placed = self._placed.get(request_id)
        if placed is None or placed.replica_id == replica_id or replica_id not in self._replicas:
            return
        if self._seen_by.get(request_id) == replica_id:
            self._leave(request_id)
            self._enter(request_id, replica_id)
            return
        self.release(request_id)
        self._book(replica_id, reservation)

    def release(self, request_id: RequestId) -> None:
        """The request is over. Idempotent."""
        placed = self._placed.get(request_id)
        if placed is None:
            return
        placed.drop(request_id)
        self._leave(request_id)
        self._seen_by.pop(request_id, None)

    def expire(self) -> int:
        """Drop reservations nobody released in time; how many. They stay in flight."""
        made_before = self._clock() - self._reservation_ttl_s
        return sum([replica.expire(made_before) for replica in self._replicas.values()])

    def view(self, replica_id: ReplicaId) -> LoadView:
        return self._replicas[replica_id].view(self._clock(), self._silent_after_s)

    def views(self) -> list[tuple[ReplicaId, LoadView]]:
        """Every replica at this moment."""
        now, silent_after_s = self._clock(), self._silent_after_s
        return [(name, replica.view(now, silent_after_s)) for name, replica in self._replicas.items()]

    def placed(self, request_id: RequestId) -> ReplicaId | None:
        """Where a request is in flight; None if it is not."""
        placed = self._placed.get(request_id)
        return placed.replica_id if placed is not None else None

    def _book(self, replica_id: ReplicaId, reservation: Reservation) -> None:
        self._replicas[replica_id].reserve(reservation, self._clock())
        self._enter(reservation.request_id, replica_id)

    def _enter(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        replica = self._replicas[replica_id]
        self._placed[request_id] = replica
        replica.num_in_flight += 1

    def _leave(self, request_id: RequestId) -> None:
        self._placed.pop(request_id).num_in_flight -= 1


class QueueAverage:
    """Exponentially weighted mean of queued requests per replica: how saturated the fleet is."""

    def __init__(self, time_constant_s: float = 5.0) -> None:
        self._time_constant_s = time_constant_s
        self._mean = 0.0
        self._updated_at: float | None = None

    def update(self, queued_per_replica: float, now: float) -> float:
        """The mean after this observation, held since the last one."""
        if self._updated_at is None:
            self._mean = queued_per_replica
        else:
            kept = math.exp(-max(0.0, now - self._updated_at) / self._time_constant_s)
            self._mean = kept * self._mean + (1.0 - kept) * queued_per_replica
        self._updated_at = now
        return self._mean


def _sane(model: StepTimeModel | None) -> StepTimeModel | None:
    """The model if its terms are finite and not negative: a bad fit must not price work below zero."""
    if model is None:
        return None
    terms = (model.base_s, model.per_token_s, model.per_attention_s, model.per_sequence_s)
    return model if all(math.isfinite(term) and term >= 0 for term in terms) and any(terms) else None
