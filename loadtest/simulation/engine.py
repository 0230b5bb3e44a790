"""One simulated replica: production's scheduler, cache and event log, and a model's step time for a runner.

It goes from step to step as `replica/engine/engine.py` does: between steps it takes in what has come and
tells the routers when there is something to tell; what comes inside a step is told at once
(`replica/engine/arrivals.py`). Steps that only decode are taken many at once: that changes how long the
simulation takes, and nothing else (a property test). To that end such steps tell nothing of themselves, where
the engine would send its load every 10 ms: only the length of its contexts has changed. Heartbeats of a
fleet that waits for its next request are left out alike.
Its speed is published from the start: on steps that follow the model the engine's fit finds the model.
Knows steps and seconds; knows neither routers nor placement.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cache.block_hash import hints
from cache.event_log import EventLog
from cache.events import EventBatch, Load, StepTimeModel
from cache.kv_cache_manager import KVCacheManager
from cache.messages import SamplingParams
from cache.types import HashHint, ReplicaId, RequestId
from loadtest.simulation.clock import EventQueue, first_from
from loadtest.simulation.crowd import Crowd, Pace
from loadtest.simulation.machine import Machine, MachineWithHost
from loadtest.simulation.turns import Turn, TurnTokens
from replica.config import ReplicaConfig
from replica.engine.arrivals import Arrival, Arrivals
from replica.engine.bulletins import LOAD_INTERVAL_S
from replica.output.detokenizer import Detokenizer, NoText
from replica.scheduling.request import Request
from replica.scheduling.runner import StepResult
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.step_time import attention_pairs

HEARTBEAT_S = ReplicaConfig().heartbeat_interval_s
NEVER_FULL = 1 << 30  # requests that may wait: a refused one would have no time to first token

# Nobody reads the text: one detokenizer that all requests share and none uses.
_SAMPLING = SamplingParams(max_tokens=1)
_NO_TEXT = Detokenizer(NoText(), _SAMPLING, frozenset(), max_tokens=1, sent_chars=0)


class EngineListener(Protocol):
    """Whoever reads the replica's streams and hears its events. Called at the moment it happens."""

    def first_token(self, engine: SimEngine, turn: Turn, cached_tokens: int) -> None: ...
    def finished(self, engine: SimEngine, turn: Turn) -> None: ...
    def published(self, engine: SimEngine, batch: EventBatch) -> None: ...
    def told_load(self, engine: SimEngine, load: Load) -> None: ...
    def between_steps(self, engine: SimEngine) -> None:
        """The engine is about to plan its next step; what is submitted now is part of it."""


class SimEngine:
    def __init__(
        self,
        index: int,
        replica_id: ReplicaId,
        machine: Machine,
        cache: KVCacheManager,
        *,
        num_blocks: int,
        queue: EventQueue,
        listener: EngineListener,
        events: EventLog | None = None,
        slowdown: float = 1.0,
        crowd: Crowd | None = None,
        jumps: bool = True,
        quiet_until: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """num_blocks: that its running sequences may hold. events: the log that is also the cache's sink;
        None publishes nothing. crowd: of its machine, if it shares that. jumps: take quiet steps many at
        once, which those that share a machine never do: others begin in the middle of them. quiet_until:
        before then nobody looks at what idle replicas say; a time that has passed: somebody may."""
        self.index = index
        self.replica_id = replica_id
        self._pace = Pace(machine.step_time(slowdown), index, crowd)
        self.scheduler = Scheduler(
            cache,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            max_model_len=machine.max_model_len,
            max_batched_tokens=machine.max_batched_tokens,
            max_running=machine.max_running,
            max_waiting=NEVER_FULL,
            clock=queue,
            order=machine.scheduling_order,
            itl_target_s=machine.itl_target_s,
            pace=lambda: self.step_time,
            copy_block_s=lambda: self._copy_block_s,
        )
        self._copy_block_s = machine.copy_block_s if isinstance(machine, MachineWithHost) else None
        self.is_alive = True
        self.busy_s = 0.0  # of periods that are over
        self.prefill_tokens = 0  # prompt tokens computed
        self.prompt_s = 0.0  # of steps that computed them and are over
        self.num_steps = 0
        self._cache = cache
        self._queue = queue
        self._listener = listener
        self._events = events
        self._jumps = jumps and crowd is None
        self._quiet_until = quiet_until
        self._inbox: list[tuple[Turn, int]] = []  # and how many tokens of its answer it brings along
        self._turns: dict[RequestId, Turn] = {}
        self._admitted: list[RequestId] = []  # taken in since the last batch
        self._has_news = False  # something ended since the last batch
        self._has_prefilled = False  # the last step computed a part of a prompt
        self._arrivals = Arrivals(machine.scheduling_order, machine.max_batched_tokens)
        self._told: set[HashHint] = set()  # the cache as of the last batch
        self._published_s = queue.now
        self._run: _Run | None = None  # the steps being computed
        self._busy_since: float | None = None  # None while idle
        if events is not None:
            queue.at(queue.now + HEARTBEAT_S, self._heartbeat)

    def submit(self, turn: Turn, *, num_output: int = 0) -> None:
        """A request has come; num_output: tokens of its answer that an earlier attempt generated."""
        assert self.is_alive, "sent to a replica that has died"
        if self._run is not None and self._events is not None:
            self._announce(turn, num_output)
        self._inbox.append((turn, num_output))
        self.call()

    def call(self) -> None:
        """Go between two steps as soon as the one in progress is over; now if there is none."""
        if self._run is None:
            self._begin()
        elif self._run.num_steps > 1:
            self._cut_short(self._run)

    def kill(self) -> list[tuple[Turn, int]]:
        """Stop at once. What was being served, with the tokens each has generated."""
        self.is_alive = False
        self._rest()
        if self._run is not None:  # the steps of this run that are over, and none of the one in progress
            self._run.num_steps = max(0, self._steps_by(self._run, self._queue.now) - 1)
            unread = self._run.num_steps
        else:
            unread = 0
        self._run = None
        lost = [
            (
                self._turns[request.request_id],
                request.num_output_tokens + (unread if request.is_decoding else 0),
            )
            for request in self.scheduler
        ]
        return lost + self._inbox

    @property
    def step_time(self) -> StepTimeModel:
        """As it tells of itself."""
        return self._pace.fitted

    @property
    def step_ends_s(self) -> float:
        """When the step in progress ends; now for an engine between steps."""
        run, now = self._run, self._queue.now
        if run is None:
            return now
        end_s = run.began_s
        for number in range(self._steps_by(run, now)):
            end_s += run.step_s(number)
        return end_s

    @property
    def in_progress(self) -> Mapping[RequestId, int]:
        """Tokens that the step in progress computes, by request; none between steps."""
        run = self._run
        return {} if run is None else {request.request_id: count for request, count in run.planned}

    @property
    def inbox(self) -> Sequence[tuple[Turn, int]]:
        """Come since the step in progress began; and how many tokens of its answer each brings along."""
        return self._inbox

    def take(self, turn: Turn) -> None:
        """Take a request into the step about to be planned: for `EngineListener.between_steps`."""
        self._inbox.append((turn, 0))

    # -- from step to step ------------------------------------------------------------------------

    def _begin(self) -> None:
        """Between two steps: take in, tell, plan, compute."""
        self._listener.between_steps(self)
        for turn, num_output in self._inbox:
            self._take_in(turn, num_output)
        self._inbox.clear()
        self._publish_if_due()
        planned = self.scheduler.plan()
        if not planned:
            assert not len(self.scheduler), "requests are left, but none can be scheduled"
            self._rest()
            return
        if self._busy_since is None:
            self._busy_since = self._queue.now
        self._compute(planned)

    def _compute(self, planned: Sequence[tuple[Request, int]]) -> None:
        """Start on the planned step, and on the quiet ones after it in which nobody ends."""
        new_tokens, attention, num_steps, has_prompt = 0, 0.0, NEVER_FULL, False
        for request, num_tokens in planned:
            computed = request.num_computed
            new_tokens += num_tokens
            attention += attention_pairs(computed, num_tokens)
            if computed < request.num_prompt_tokens:
                has_prompt = True
                self.prefill_tokens += num_tokens
                num_steps = 1  # its first token, if it gets one, is told at once
            else:
                num_steps = min(num_steps, request.max_output_tokens - request.num_output_tokens)
        if num_steps > 1:
            # What the plan has pushed out of the cache is told after the first of them.
            has_news = self._events is not None and self._events.has_changes
            is_one = has_news or not self._jumps
            num_steps = 1 if is_one else min(num_steps, 1 + self.scheduler.quiet_steps())
        self._has_prefilled = has_prompt
        run = _Run(self._queue.now, planned, new_tokens, attention, num_steps, self._pace.step())
        if self._copy_block_s is not None:  # what is copied out goes beside the step
            run.copy_s = len(self._cache.take_moves().loads) * self._copy_block_s
        self._run = run
        self._schedule_end(run)

    def _rest(self) -> None:
        """Idle from now on."""
        self._pace.rests()
        if self._busy_since is not None:
            self.busy_s += self._queue.now - self._busy_since
            self._busy_since = None

    def _schedule_end(self, run: _Run) -> None:
        """Let the run end with its last step, or with the first after which a heartbeat is due."""
        due_s = self._published_s + HEARTBEAT_S if self._events is not None else float("inf")
        end_s = run.began_s
        for number in range(run.num_steps):
            end_s += run.step_s(number)
            if end_s >= due_s:
                run.num_steps = number + 1
                break
        self._queue.at(end_s, self._end, run, run.num_steps)

    def _end(self, run: _Run, num_steps: int) -> None:
        """A run is over: its tokens, whoever ended, and on to the next."""
        if run is not self._run or run.num_steps != num_steps:
            return  # it was cut short, or its replica died
        scheduler = self.scheduler
        planned = run.planned
        if num_steps > 1:
            more = array("b", bytes(num_steps - 1))
            scheduler.advance([more] * len(planned))
        tokens = tuple(
            [0 if len(r.token_ids) - r.num_computed == num_tokens else None for r, num_tokens in planned]
        )
        self._run = None
        if self._has_prefilled:
            self.prompt_s += self._queue.now - run.began_s
        self.num_steps += num_steps
        for request in scheduler.update(StepResult(tokens, elapsed_s=self._queue.now - run.began_s)):
            num_output = request.num_output_tokens
            if num_output == 1:
                self._listener.first_token(self, self._turns[request.request_id], request.cached_tokens or 0)
            if num_output == request.max_output_tokens:
                scheduler.finish(request)
                self._has_news = True
                self._listener.finished(self, self._turns.pop(request.request_id))
        self._begin()

    def _cut_short(self, run: _Run) -> None:
        """Somebody has come: the step in progress is the run's last."""
        num_steps = self._steps_by(run, self._queue.now)
        if num_steps < run.num_steps:
            run.num_steps = num_steps
            self._schedule_end(run)

    @staticmethod
    def _steps_by(run: _Run, now: float) -> int:
        """Steps of the run that have begun before `now`; at least the first, and at most all."""
        end_s = run.began_s
        for number in range(run.num_steps):
            end_s += run.step_s(number)
            if end_s >= now:
                return number + 1
        return run.num_steps

    def _take_in(self, turn: Turn, num_output: int) -> None:
        work = turn.work
        tokens = TurnTokens.of(work.input_tokens + num_output, turn.block_hashes)
        self.scheduler.check_room(work.input_tokens, work.output_tokens)
        self.scheduler.submit(
            Request(
                request_id=turn.request_id,
                token_ids=tokens,
                num_prompt_tokens=work.input_tokens,
                max_output_tokens=work.output_tokens,
                sampling=_SAMPLING,
                seed=0,
                arrival_s=self._queue.now,
                waited_s=self._queue.now - work.arrival_s,
                expires_s=None,
                blocks=self._cache.begin(tokens),
                detokenizer=_NO_TEXT,
                for_cache=turn.is_copy,
            )
        )
        self._turns[turn.request_id] = turn
        self._admitted.append(turn.request_id)

    # -- what routers are told --------------------------------------------------------------------

    def _publish_if_due(self) -> None:
        """As `Engine` does: when something changed, or a heartbeat when nothing did for a while."""
        if self._events is None:
            return
        interval_s = LOAD_INTERVAL_S if self._has_prefilled else HEARTBEAT_S
        is_due = self._queue.now >= self._published_s + interval_s  # as `_schedule_end` has it, to the bit
        if not (self._events.has_changes or self._admitted or self._has_news or is_due):
            return
        self._published_s = self._queue.now
        self._has_news = False
        load = self.scheduler.load(tuple(self._admitted))
        self._admitted.clear()
        batch = self._events.flush(load)
        self._told.difference_update(batch.removed)
        self._told.update(batch.stored)
        self._arrivals.settle(load, self._queue.now, self._told)
        self._listener.published(self, batch)

    def _announce(self, turn: Turn, num_output: int) -> None:
        """Tell of a request that came inside a step, as `Publisher` does."""
        num_tokens = turn.work.input_tokens + num_output
        names = hints(turn.block_hashes[: num_tokens // self._cache.block_size])
        waited_s = self._queue.now - turn.work.arrival_s
        arrival = Arrival(turn.request_id, num_tokens, names, self._cache.block_size, waited_s=waited_s)
        self._arrivals.arrived(arrival, self._told, self._queue.now)
        load = self._arrivals.load(self._queue.now, self._arrivals.take_unnamed())
        self._listener.told_load(self, load)

    def _heartbeat(self) -> None:
        """Say that the replica is there, while it is idle; between steps `_begin` does."""
        if not self.is_alive:
            return
        if self._run is None:
            self._publish_if_due()
        next_s = max(self._published_s, self._queue.now) + HEARTBEAT_S
        if self._run is None:
            next_s = first_from(next_s, HEARTBEAT_S, self._quiet_until())
        self._queue.at(next_s, self._heartbeat)


class _Run:
    """Steps planned alike, one after the other: the first as planned, then one token more for each."""

    __slots__ = (
        *("attention", "began_s", "copy_s", "model", "new_tokens", "num_sequences", "num_steps", "planned"),
    )

    def __init__(
        self,
        began_s: float,
        planned: Sequence[tuple[Request, int]],
        new_tokens: int,
        attention: float,
        num_steps: int,
        model: StepTimeModel,
    ) -> None:
        self.began_s = began_s
        self.planned = planned
        self.new_tokens = new_tokens
        self.attention = attention  # of the first step
        self.num_sequences = len(planned)
        self.num_steps = num_steps
        self.model = model
        self.copy_s = 0.0  # from host memory, before the first step

    def step_s(self, number: int) -> float:
        """Seconds of step `number`, from 0."""
        attention = self.attention + number * self.num_sequences
        compute_s = self.model.step_s(self.new_tokens, attention, self.num_sequences)
        return compute_s if number else compute_s + self.copy_s
