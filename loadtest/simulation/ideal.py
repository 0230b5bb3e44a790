"""The yardsticks: what the same engines would do with one cache of N times the capacity between them.

A block that any engine has computed (or is computing) is there for all, at once and for nothing, so
placement decides nothing but the waiting. Each request goes where its first token comes soonest, by the
engine's true queue.

    ideal            first come, first served: bound to an engine on arrival
    ideal_shortest   held until an engine has room, least `prefill - aging * waited` first: the order of
                     late binding (`router/held.py`), its floor for the old included

Knows engines from inside, which no router can. Neither is a bound in the strict sense: greedy choices are not
always the best ones.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from cache.events import EventBatch
from cache.kv_cache_manager import KVCacheManager
from cache.types import ReplicaId
from loadtest.simulation.cell import IDEAL_SHORTEST, CellResult, CellSpec
from loadtest.simulation.clock import EventQueue
from loadtest.simulation.engine import SimEngine
from loadtest.simulation.recorder import Recorder
from loadtest.simulation.turns import Turn, TurnHasher, TurnTokens, fingerprint, make_turns
from loadtest.workloads.request import Workload
from replica.request import RequestState
from replica.step_time import attention_pairs

AGING = 0.1  # seconds of own prefill that one second of waiting outweighs
AGE_FLOOR_S = 20.0  # who has waited this long goes before everybody who has not


class IdealCluster:
    """An `EngineListener`. `run` once."""

    def __init__(self, workload: Workload, spec: CellSpec, *, jumps: bool = True) -> None:
        mark = fingerprint(workload.block_tokens)
        self._turns = make_turns(workload)
        self._queue = EventQueue()
        self._recorder = Recorder(self._turns)
        self._budget = spec.machine.max_batched_tokens
        num_blocks = max(1, spec.num_replicas * spec.cache_tokens // workload.block_tokens)
        self._cache = KVCacheManager(num_blocks, TurnHasher(mark), block_size=workload.block_tokens)
        self._engines = [
            SimEngine(
                index,
                ReplicaId(f"r{index}"),
                spec.machine,
                self._cache,
                queue=self._queue,
                listener=self,
                slowdown=spec.slowdowns[index] if index < len(spec.slowdowns) else 1.0,
                jumps=jumps,
                shares_cache=True,
            )
            for index in range(spec.num_replicas)
        ]
        self._shelf = _Shelf() if spec.policy == IDEAL_SHORTEST else None

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
        uncached = self._uncached(turn)
        if self._shelf is None:
            self._soonest(self._engines, turn, uncached).submit(turn)
            return
        own_s = self._own_s(self._engines[0], turn, uncached)
        self._shelf.put(turn, own_s + AGING * self._queue.now, self._queue.now)
        idle = [engine for engine in self._engines if engine.is_idle]
        if idle:  # who begins now takes the first on the shelf, which is this one
            self._soonest(idle, turn, uncached).wake()

    def between_steps(self, engine: SimEngine) -> None:
        """The coming step has room for so many tokens of prefill: fill it from the shelf."""
        if self._shelf is None:
            return
        scheduler = engine.scheduler
        room = self._budget - scheduler.num_running - scheduler.queued_uncached_tokens
        while room > 0 and not scheduler.num_waiting and (turn := self._shelf.take(self._queue.now)):
            room -= self._uncached(turn)
            engine.take(turn)

    def _soonest(self, engines: list[SimEngine], turn: Turn, uncached: int) -> SimEngine:
        return min(engines, key=lambda engine: self._first_token_s(engine, turn, uncached))

    def _first_token_s(self, engine: SimEngine, turn: Turn, uncached: int) -> float:
        """When the engine would have computed the prompt behind what it has, by its own step times."""
        scheduler, model = engine.scheduler, engine.step_time
        tokens, attention, decoding = uncached, self._attention(turn, uncached), 0
        for request in scheduler:
            if request.is_decoding:
                decoding += 1
                continue
            done = request.num_computed
            if request.state is RequestState.WAITING:
                done = request.expected_hit
            left = len(request.token_ids) - done
            tokens += left
            attention += attention_pairs(done, left)
        for waiting, _ in engine.inbox:
            left = self._uncached(waiting)
            tokens += left
            attention += self._attention(waiting, left)
        chunk = max(1, self._budget - decoding)
        num_steps = -(-tokens // chunk)
        beside_s = model.step_s(decoding, 0.0, decoding + 1)
        return (
            engine.step_ends_s
            + num_steps * beside_s
            + model.per_token_s * tokens
            + (model.per_attention_s * attention)
        )

    def _own_s(self, engine: SimEngine, turn: Turn, uncached: int) -> float:
        return engine.step_time.prefill_s(uncached, turn.work.input_tokens - uncached, self._budget)

    def _uncached(self, turn: Turn) -> int:
        tokens = TurnTokens.of(turn.work.input_tokens, turn.block_hashes)
        return turn.work.input_tokens - self._cache.match(self._cache.begin(tokens)).num_tokens

    @staticmethod
    def _attention(turn: Turn, uncached: int) -> float:
        return attention_pairs(turn.work.input_tokens - uncached, uncached)

    # -- what engines say (EngineListener) --------------------------------------------------------

    def first_token(self, engine: SimEngine, turn: Turn, cached_tokens: int) -> None:
        self._recorder.first_token(turn, self._queue.now, engine.index, cached_tokens)

    def finished(self, engine: SimEngine, turn: Turn) -> None:
        self._recorder.finished(turn, self._queue.now)
        for other in self._engines:  # whose requests may have waited for these blocks
            if other is not engine and other.is_idle and other.scheduler.num_waiting:
                self._queue.at(self._queue.now, other.wake)

    def published(self, engine: SimEngine, batch: EventBatch) -> None:
        raise AssertionError("the ideal's engines have nobody to tell")


class _Shelf:
    """Requests that nobody has yet, in the order they leave."""

    def __init__(self) -> None:
        self._by_key: list[tuple[float, int, Turn]] = []  # a heap; all age alike, so keys stand still
        self._by_age: OrderedDict[int, tuple[float, Turn]] = OrderedDict()  # oldest first, who is here

    def put(self, turn: Turn, key: float, now: float) -> None:
        heapq.heappush(self._by_key, (key, turn.index, turn))
        self._by_age[turn.index] = now, turn

    def take(self, now: float) -> Turn | None:
        if not self._by_age:
            return None
        since, oldest = next(iter(self._by_age.values()))
        if now - since >= AGE_FLOOR_S:
            del self._by_age[oldest.index]
            return oldest
        while True:
            _, index, turn = heapq.heappop(self._by_key)
            if self._by_age.pop(index, None) is not None:  # else it left by its age
                return turn
