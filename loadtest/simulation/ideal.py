"""The yardsticks: what the same engines would do if each request went where its first token comes soonest.

By what the engines hold, compute and queue at that moment, known from inside, which no router can. What they
find cached is one cache's of N times the capacity, or each one's own (`ideal_caches.py`).

    ideal                  one cache; first come, first served: bound to an engine on arrival
    ideal_shortest         one cache; held until its engine's next step has room, least
                           `prefill - aging * waited` first: the order of late binding
                           (`router/placement/held.py`), floor for the old and window included
    ideal_apart            the caches of the fleet as it is; first come, first served
    ideal_apart_shortest   the same caches; late binding's order

The distance between a router and the first two is what it misses and what no placement can have; the other
two tell these apart. None is a bound in the strict sense: greedy choices are not always the best ones, least
of all where a prefix is computed again on every engine that is idle for a moment; and where memory is what
runs out (overload on a small cache) the queue's length in seconds is not what decides.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice, takewhile

from cache.events import EventBatch, Load
from cache.types import ReplicaId
from loadtest.simulation.cell import IDEALS_APART, IDEALS_SHORTEST, CellResult, CellSpec
from loadtest.simulation.clock import EventQueue
from loadtest.simulation.crowd import Crowd
from loadtest.simulation.engine import SimEngine
from loadtest.simulation.ideal_caches import IdealCaches, Need, OneCache, OwnCaches, need_of
from loadtest.simulation.recorder import Recorder
from loadtest.simulation.turns import Turn, make_turns
from loadtest.workloads.request import Workload
from replica.scheduling.request import RequestState

AGING = 0.1  # seconds of own prefill that one second of waiting outweighs
WINDOW = 24  # of the order, for whom the choice is made at one time
AGE_FLOOR_S = 120.0  # who has waited this long goes before everybody who has not


class IdealCluster:
    """An `EngineListener`. `run` once."""

    def __init__(self, workload: Workload, spec: CellSpec, *, jumps: bool = True) -> None:
        self._turns = make_turns(workload)
        self._queue = EventQueue()
        self._recorder = Recorder(self._turns)
        self._budget = spec.machine.max_batched_tokens
        own_blocks = max(1, spec.cache_tokens // workload.block_tokens)
        caches = OwnCaches if spec.policy in IDEALS_APART else OneCache
        self._caches: IdealCaches = caches(spec.num_replicas, own_blocks, block_tokens=workload.block_tokens)
        crowd = Crowd.of(spec.machine)
        self._engines = [
            SimEngine(
                index,
                ReplicaId(f"r{index}"),
                spec.machine,
                cache,
                num_blocks=own_blocks,
                queue=self._queue,
                listener=self,
                slowdown=spec.slowdowns[index] if index < len(spec.slowdowns) else 1.0,
                crowd=crowd,
                jumps=jumps,
            )
            for index, cache in enumerate(self._caches.by_engine)
        ]
        self._shelf = _Shelf() if spec.policy in IDEALS_SHORTEST else None
        self._is_emptying = False

    def run(self, load_1_rate_per_s: float = 0.0) -> CellResult:
        """Simulate until the last request has its last token."""
        queue = self._queue
        for turn in self._turns:
            queue.at(turn.work.arrival_s, self._arrive, turn)
        while self._recorder.num_left:
            assert queue.step(), "requests are left, but nothing will happen any more"
        return self._recorder.result(
            self._engines, num_events=queue.num_events, num_retries=0, load_1_rate_per_s=load_1_rate_per_s
        )

    # -- where to ---------------------------------------------------------------------------------

    def _arrive(self, turn: Turn) -> None:
        if self._shelf is None:
            best, _ = self._soonest([self._backlog(engine) for engine in self._engines], turn)
            best.engine.submit(turn)
            return
        key = self._own_s(turn) + AGING * self._queue.now
        self._shelf.put(turn, key, self._queue.now)
        self._empty_shelf(None)

    def between_steps(self, engine: SimEngine) -> None:
        if self._shelf is not None and self._shelf and not self._is_emptying:
            self._empty_shelf(engine)

    def _empty_shelf(self, beginning: SimEngine | None) -> None:
        """Give whoever is next to the engine that is best for it, if that one's next step has room.

        beginning: the engine that is about to plan a step, if one is.
        """
        assert self._shelf is not None
        backlogs = [self._backlog(engine) for engine in self._engines]
        self._is_emptying = True
        for turn in self._shelf.first(WINDOW, self._queue.now):
            if all(backlog.room <= 0 for backlog in backlogs):
                break
            best, need = self._soonest(backlogs, turn)
            if best.room <= 0:
                continue
            self._shelf.remove(turn)
            best.add(need)
            if best.engine is beginning:
                best.engine.take(turn)
            else:
                best.engine.submit(turn)
        self._is_emptying = False

    def _backlog(self, engine: SimEngine) -> _Backlog:
        backlog = _Backlog(engine, self._budget)
        for waiting, _ in engine.inbox:
            backlog.add(*self._caches.needs(waiting, [engine]))
        return backlog

    def _soonest(self, backlogs: list[_Backlog], turn: Turn) -> tuple[_Backlog, Need]:
        """Where its first token comes first, and what it leaves to compute there."""
        needs = self._caches.needs(turn, [backlog.engine for backlog in backlogs])
        choices = zip(backlogs, needs, strict=True)
        return min(choices, key=lambda choice: choice[0].first_token_s(choice[1]))

    def _own_s(self, turn: Turn) -> float:
        """Its prefill alone, where most of it is found."""
        uncached = min(need.tokens for need in self._caches.needs(turn, self._engines))
        model = self._engines[0].step_time
        return model.prefill_s(uncached, turn.work.input_tokens - uncached, self._budget)

    # -- what engines say (EngineListener) --------------------------------------------------------

    def first_token(self, engine: SimEngine, turn: Turn, cached_tokens: int) -> None:
        self._recorder.first_token(turn, self._queue.now, engine.index, cached_tokens)

    def finished(self, engine: SimEngine, turn: Turn) -> None:
        self._recorder.finished(turn, self._queue.now)

    def published(self, engine: SimEngine, batch: EventBatch) -> None:
        raise AssertionError("the ideal's engines have nobody to tell")

    def told_load(self, engine: SimEngine, load: Load) -> None:
        raise AssertionError("the ideal's engines have nobody to tell")


class _Backlog:
    """What stands before a new request on one engine, from the end of the step in progress on."""

    def __init__(self, engine: SimEngine, budget: int) -> None:
        self.engine = engine
        self._budget = budget
        self._tokens = 0  # of prompts, to compute
        self._attention = 0.0  # of these
        self._num_decoding = 0
        self._in_progress = 0  # tokens of prompts that the step in progress computes
        in_progress = engine.in_progress
        for request in engine.scheduler:
            if request.is_decoding:
                self._num_decoding += 1
                continue
            is_waiting = request.state is RequestState.WAITING
            done = request.expected_hit if is_waiting else request.num_computed
            computing = in_progress.get(request.request_id, 0)
            self._in_progress += computing
            done += computing  # by the end of the step in progress
            if done < len(request.token_ids):
                self.add(need_of(len(request.token_ids), done))
            elif request.num_output_tokens + 1 < request.max_output_tokens:
                self._num_decoding += 1  # from the next step on
        self._step_ends_s = engine.step_ends_s

    def add(self, need: Need) -> None:
        self._tokens += need.tokens
        self._attention += need.attention

    @property
    def room(self) -> int:
        """Tokens of prefill that it may be given now: as many as its next step could take beyond these.

        Less by what the step in progress computes: whoever is given away before a long step is over could be
        passed by nobody shorter who comes meanwhile.
        """
        return self._budget - self._num_decoding - self._tokens - self._in_progress

    def first_token_s(self, need: Need) -> float:
        """When so much more would be computed behind it, in full steps beside the present decodes."""
        model, decoding = self.engine.step_time, self._num_decoding
        tokens = self._tokens + need.tokens
        chunk = max(1, self._budget - decoding)
        num_steps = -(-tokens // chunk)
        return (
            self._step_ends_s
            + num_steps * model.step_s(decoding, 0.0, decoding + 1)
            + model.per_token_s * tokens
            + model.per_attention_s * (self._attention + need.attention)
        )


class _Shelf:
    """Requests that nobody has yet, in the order they leave."""

    def __init__(self) -> None:
        # Least key first: all age alike, so a key that counts arrival instead of waiting stands still.
        self._by_key: list[tuple[float, int, Turn]] = []
        self._by_age: dict[int, tuple[float, float, Turn]] = {}  # oldest first: key, since, turn

    def __len__(self) -> int:
        return len(self._by_age)

    def put(self, turn: Turn, key: float, now: float) -> None:
        insort(self._by_key, (key, turn.index, turn))
        self._by_age[turn.index] = key, now, turn

    def remove(self, turn: Turn) -> None:
        key, _, _ = self._by_age.pop(turn.index)
        del self._by_key[bisect_left(self._by_key, (key, turn.index))]

    def first(self, count: int, now: float) -> list[Turn]:
        """The next `count`: the old in order of age, then the others by their keys."""
        old = takewhile(lambda entry: now - entry[1] >= AGE_FLOOR_S, self._by_age.values())
        chosen = [turn for _, _, turn in islice(old, count)]
        if len(chosen) < count:
            are_old = {turn.index for turn in chosen}
            young = (turn for _, index, turn in self._by_key if index not in are_old)
            chosen += islice(young, count - len(chosen))
        return chosen
