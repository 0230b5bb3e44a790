"""How busy one replica is, as one router knows it: what the engine last said, and what this router has
sent it since.

An engine names the requests it has taken in with every batch, so a reservation counts only until then:
each router adds what the engine has not seen yet, and many routers agree without talking. Between
reports the backlog is a clock that runs down.

    reserve ──> unseen ──(named in `admitted`, or moved on, or too old)──> seen ──> release
                  └────────────────────────(call ended first)─────────────────────────┘

Knows tokens and seconds; knows neither hashes, other replicas, nor which one is best.
Owner: the router's event loop; not thread-safe. Time comes in with each call.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cache.events import Load, StepTimeModel
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from router.pricing.cost import (
    Price,
    decode_step_s,
    decoding_step_s,
    memory_pressure,
    prefill_room,
)
from router.pricing.machines import Machine, alone_s
from router.pricing.replica_state import ReplicaState, is_full_by
from router.pricing.residence import Residence
from router.pricing.step_clock import StepClock


class Reservation(NamedTuple):
    """One request's claim on one replica, until the engine itself counts it."""

    request_id: RequestId
    uncached_tokens: int
    cached_tokens: int
    num_blocks: int  # blocks its uncached tokens will take
    made_at: float  # seconds, the clock's


class ReplicaLoad:
    """One replica's latest report and this router's reservations it does not contain yet."""

    def __init__(
        self,
        replica_id: ReplicaId,
        info: ReplicaInfo,
        now: float,
        silent_after_s: float,
        changed: set[ReplicaLoad],
        residence: Residence,
        machine: Machine | None = None,
        crowding_weight: float = 1.0,
    ) -> None:
        """changed: where it enters itself when its state is another than the one it gave last.
        residence: how long sequences stay. machine: None if it shares none. crowding_weight: how much counts
        of what those that share it wait for."""
        self.replica_id = replica_id
        self.info = info
        self.silent_at = now + silent_after_s  # a new replica has the benefit of the doubt
        self._silent_after_s = silent_after_s
        self._last_chosen = 0
        self._num_in_flight = 0  # of this router
        self._load = Load(free_blocks=info.num_blocks, total_blocks=info.num_blocks)
        self._step_time: StepTimeModel | None = None  # what it is priced by
        self._fleet_time: StepTimeModel | None = None  # a typical replica is; None: as this one
        self._room = info.max_batched_tokens  # tokens of a step beside those of running sequences
        self._decode_s = 0.0  # what those add to each step
        self._step_s = 0.0  # of one in which only they decode
        self._steps = StepClock()
        self._slowness = 1.0  # see `ReplicaState`
        self._unseen: dict[RequestId, Reservation] = {}  # oldest first
        self._unseen_blocks = 0
        self._unseen_tokens = 0
        self._busy_until = now  # when today's backlog will have been prefilled
        self._late_until = now  # before then it starts nothing, as far as its other requests tell
        self._residence = residence
        # Of a block that it evicts, see `Evictions`; they count with the next report.
        self.regret = self.uses_lost = 0.0
        self._reported_at = now
        self._machine = machine
        self._crowding_weight = crowding_weight
        self._changed = changed
        self._state: ReplicaState | None = None  # as of the last change; None: to be made when asked for
        changed.add(self)
        if machine is not None:
            machine.enter(self)

    @property
    def load(self) -> Load:
        return self._load

    @property
    def num_unseen(self) -> int:
        return len(self._unseen)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def oldest_unseen_at(self) -> float:
        """When the oldest reservation the engine has not seen was made; inf: there is none."""
        return next(iter(self._unseen.values())).made_at if self._unseen else math.inf

    def report(
        self,
        load: Load,
        model: StepTimeModel | None,
        now: float,
        fleet_time: StepTimeModel | None = None,
        *,
        is_between_steps: bool = False,
    ) -> None:
        """The engine's own account replaces ours; reservations it does not name stay on top of it.

        model: what it is priced by from now on; None while nobody can tell how fast it is. fleet_time: the
        same of a typical replica; None: as this one. is_between_steps: it was made as a step began.
        """
        self.silent_at = now + self._silent_after_s
        self._reported_at = now
        self._load = load
        self._step_time, self._fleet_time = model, fleet_time
        for request_id in load.admitted:
            reservation = self._forget(request_id)
            if reservation is not None and not is_between_steps:
                self._steps.arrived(now - reservation.made_at)
        self._derive()
        self._busy_until = now + self._work_s()
        if is_between_steps:
            self._steps.begins(self._first_step_s(), self._step_s, now)
        self._remake()

    def price_by(
        self, model: StepTimeModel | None, now: float, fleet_time: StepTimeModel | None = None
    ) -> None:
        """It is taken to be as fast as that from now on, also for what it has still to do."""
        left_s, before_s = max(0.0, self._busy_until - now), self._work_s()
        self._step_time, self._fleet_time = model, fleet_time
        self._derive()
        left = left_s / before_s if before_s else 1.0  # all of it, where nobody could tell how long it takes
        self._busy_until = now + left * self._work_s()
        self._remake()

    def reserve(self, reservation: Reservation, now: float) -> None:
        self._unseen[reservation.request_id] = reservation
        self._unseen_blocks += reservation.num_blocks
        self._unseen_tokens += reservation.uncached_tokens
        self._busy_until = max(now, self._busy_until) + self._prefill_s(reservation)
        self._forget_state()

    def drop(self, request_id: RequestId) -> None:
        """The request did not come after all, or is over. Nothing happens if the engine has seen it."""
        reservation = self._forget(request_id)
        if reservation is not None:
            self._busy_until -= self._prefill_s(reservation)

    def expire(self, made_before: float) -> int:
        """Drop reservations older than that; how many. The oldest come first, so this stops early."""
        dropped = 0
        while self.oldest_unseen_at < made_before:
            self.drop(next(iter(self._unseen)))
            dropped += 1
        return dropped

    def delay(self, until: float) -> None:
        """It starts nothing new before then, whatever it has said. Replaces what was said before."""
        self._late_until = until
        self._forget_state()

    def enter(self) -> None:
        """One more of this router's requests is in flight there."""
        self._num_in_flight += 1
        self._forget_state()

    def leave(self) -> None:
        self._num_in_flight -= 1
        self._forget_state()

    def choose(self, number: int) -> None:
        """The decision of that number chose it."""
        self._last_chosen = number
        self._forget_state()

    def gone(self) -> None:
        """It computes no more: its machine is the others'. Idempotent."""
        if self._machine is not None:
            self._machine.leave(self)

    def state(self) -> ReplicaState:
        """As of the last change. O(1)."""
        return self._state or self._remake()

    def neighbours_changed(self) -> None:
        """Another one of its machine has begun to work, or has ended."""
        if self._state is not None:
            self._state = None
            self._changed.add(self)

    def _forget_state(self) -> None:
        if self._machine is not None:
            load = self._load
            self._machine.note(self, is_busy=bool(load.num_running or load.num_waiting or self._unseen))
        self.neighbours_changed()

    def _remake(self) -> ReplicaState:
        load, info, unseen, model = self._load, self.info, len(self._unseen), self._step_time
        num_waiting, used = load.num_waiting + unseen, self._used_fraction()
        num_requests, start_at = load.num_running + num_waiting, self._start_at(num_waiting)
        price = None
        if model is not None:
            pressure = memory_pressure(used)
            fleet_time = self._fleet_time or model
            price = Price(
                start_at,
                model,
                self._decode_s,
                self._room,
                self._steps.pace * self._step_s,
                self._steps.boundary_at,
                pressure,
                fleet_time,
                self.regret,
                self._alone_s(model, num_requests),
                self.uses_lost,
            )
        self._state = state = ReplicaState(
            self.replica_id,
            price,
            self.silent_at,
            load.is_draining or is_full_by(load, info, num_requests),
            num_waiting,
            num_requests,
            self._last_chosen,
            self._num_in_flight,
            load.queued_uncached_tokens + self._unseen_tokens,
            used,
            start_at,
            self._first_at(),
            self._slowness,
            model,
            load,
            info,
        )
        return state

    def _alone_s(self, model: StepTimeModel, num_requests: int) -> float:
        """What a newcomer's own steps take from others on its machine."""
        if self._machine is None:
            return 0.0
        crowding = self._machine.crowding(self, self.info.machine_engines)
        if not crowding:
            return 0.0
        stay_s = self._slowness * self._residence.mean_s
        own_s = alone_s(model, self._decode_s, num_requests, stay_s)
        return self._crowding_weight * crowding * own_s

    def _start_at(self, num_waiting: int) -> float:
        """When it can start on a newcomer: behind what is queued, and with a place."""
        num_short = max(
            self._load.num_running + num_waiting + 1 - self.info.max_running,
            self._num_without_blocks(num_waiting),
        )
        return max(self._busy_until, self._late_until, self._ended_at(num_short))

    def _first_at(self) -> float:
        """When it can start on a newcomer that goes before all who wait: nobody who runs gives up blocks."""
        return max(self._late_until, self._ended_at(self._num_without_blocks(0)))

    def _ended_at(self, num_short: int) -> float:
        """When so many of those who run will have ended."""
        if num_short <= 0:
            return -math.inf
        ended_s = self._residence.until_ended_s(num_short, self._load.num_running)
        return self._reported_at + self._slowness * ended_s

    def _num_without_blocks(self, num_waiting: int) -> int:
        """Of those that wait and a newcomer, how many find no blocks until somebody ends.

        Each is taken to need what those who run hold and will hold, in the mean.
        """
        load = self._load
        spoken_for = load.total_blocks - load.free_blocks + load.growth_blocks
        if not load.num_running or not spoken_for:
            return 0
        room = max(0, load.free_blocks - load.growth_blocks)
        return math.ceil(num_waiting + 1 - room * load.num_running / spoken_for)

    def _derive(self) -> None:
        """What follows from report and speed."""
        load, model = self._load, self._step_time
        self._room = prefill_room(self.info.max_batched_tokens, load.num_running)
        if model is not None:
            self._decode_s = decode_step_s(model, load.num_running, load.context_tokens)
            self._step_s = decoding_step_s(model, load.num_running, self._decode_s)
            self._slowness = self._slowness_by(model)
        self._forget_state()

    def _slowness_by(self, model: StepTimeModel) -> float:
        """How much longer sequences stay than on a typical replica."""
        load, typical = self._load, self._fleet_time or model
        step_s = typical.base_s + decode_step_s(typical, load.num_running, load.context_tokens)
        return (model.base_s + self._decode_s) / step_s if typical is not model and step_s else 1.0

    def _work_s(self) -> float:
        """Seconds to prefill what was queued when it last reported, and what it has not seen."""
        return self._queued_s() + sum(map(self._prefill_s, self._unseen.values()))

    def _forget(self, request_id: RequestId) -> Reservation | None:
        reservation = self._unseen.pop(request_id, None)
        if reservation is not None:
            self._unseen_blocks -= reservation.num_blocks
            self._unseen_tokens -= reservation.uncached_tokens
            self._forget_state()
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
        """Seconds to prefill what the engine has queued; as prompts of equal length if it does not say."""
        tokens = self._load.queued_uncached_tokens
        return self._share_s(tokens, self._queued_pairs(), max(1, self._load.num_waiting)) if tokens else 0.0

    def _queued_pairs(self) -> float:
        """(query, key) pairs of what the engine has queued."""
        tokens, pairs = self._load.queued_uncached_tokens, self._load.queued_attention
        return tokens * tokens / (2 * max(1, self._load.num_waiting)) if pairs is None else pairs

    def _first_step_s(self) -> float:
        """Of the step that begins with what it reported; 0: it has nothing to do, or its speed is unknown."""
        load, model = self._load, self._step_time
        if model is None or not (load.num_running or load.num_waiting):
            return 0.0
        # Of what is queued as much as there is room for, the attention in proportion.
        tokens = min(load.queued_uncached_tokens, self._room)
        part = tokens / load.queued_uncached_tokens if tokens else 0.0
        pairs = part * self._queued_pairs()
        return model.step_s(tokens, pairs, math.ceil(part * load.num_waiting)) + self._decode_s

    def _share_s(self, tokens: int, attention: float, prompts: int) -> float:
        """Seconds of engine time for so much prefill among other work; 0 while its speed is unknown.

        Of what each step costs anyway, running sequences included, it takes the share of its tokens: small
        prompts run together in one step, and to charge each of them a whole one would drive twins away from
        where their prefix is. A prompt is a sequence more in every step that it takes a part in.
        """
        model = self._step_time
        if model is None:
            return 0.0
        steps = tokens / self._room
        return (
            model.per_token_s * tokens
            + model.per_attention_s * attention
            + model.per_sequence_s * max(prompts, steps)
            + steps * (model.base_s + self._decode_s)
        )
