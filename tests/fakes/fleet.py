"""A fleet in virtual time: the real routing core over real engine cores on the simulated runner.

One request's life as in production (choose, routed, first_token, release, finish), events late by a fixed
delay. No sockets, no threads, no Ray: what happens depends on the arguments alone.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from cache.block_hash import BlockHasher
from cache.event_log import EventLog
from cache.fingerprint import Fingerprint
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from router.config import RouterConfig
from router.placement.decision import RouteQuery
from router.placement.routing import Routing
from tests.fakes.engine import VirtualClock, fingerprint, make_request, sim_core
from tests.fakes.routing import whole

BLOCK_SIZE = 4


def _runner(replica: _Replica) -> SimRunner:
    runner = replica.core._runner
    assert isinstance(runner, SimRunner)
    return runner


@dataclass
class _Replica:
    replica_id: ReplicaId
    core: EngineCore
    log: EventLog
    clock: VirtualClock
    admitted: list[RequestId] = field(default_factory=list)
    is_stepping: bool = False


class Fleet:
    """`send` prompts at chosen times, then `run`."""

    def __init__(
        self,
        num_replicas: int,
        *,
        num_blocks: int = 256,
        event_delay_s: float = 0.002,
        sim: SimConfig | None = None,
        max_batched_tokens: int = 64,
    ) -> None:
        mark: Fingerprint = fingerprint(BLOCK_SIZE)
        self.now = 0.0
        self.config = RouterConfig(
            model_name="sim", tokenizer="none", fingerprint=mark, seed=1, silent_after_s=3600.0
        )
        self.routing = Routing(self.config, clock=lambda: self.now)
        self.hasher = BlockHasher(mark)
        self.num_answered = 0
        self._event_delay_s = event_delay_s
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._prompts: dict[RequestId, array[int]] = {}
        self._where: dict[RequestId, _Replica] = {}
        self._salts: dict[RequestId, str] = {}
        self.replicas: dict[ReplicaId, _Replica] = {}
        for index in range(num_replicas):
            clock, log = VirtualClock(), EventLog(epoch=index + 1)
            core = sim_core(num_blocks, clock=clock, sink=log, sim=sim, max_batched_tokens=max_batched_tokens)
            replica = _Replica(ReplicaId(f"r{index}"), core, log, clock)
            self.replicas[replica.replica_id] = replica
        self.routing.update_replicas({name: self._info(num_blocks) for name in self.replicas})

    def send(
        self, at_s: float, request_id: str, prompt: list[int], *, max_tokens: int = 4, salt: str = ""
    ) -> None:
        """A client sends this prompt at that moment."""
        name = RequestId(request_id)
        self._prompts[name] = array("i", prompt)
        self._salts[name] = salt
        self._at(at_s, lambda: self._arrive(name, max_tokens))

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Something else happens then."""
        self._at(at_s, act)

    def measure_steps(self, replica_id: ReplicaId) -> None:
        """From now on its steps take what its clock says, as real ones do, and not what was modelled."""
        replica = self.replicas[replica_id]
        _runner(replica)._clock = lambda: replica.clock.now_s

    def slow_down(self, replica_id: ReplicaId, factor: float) -> None:
        """From its next step on its machine takes so many times as long for everything."""
        replica = self.replicas[replica_id]
        _runner(replica)._sleep = lambda seconds: replica.clock.sleep(factor * seconds)

    def beat(self, replica_id: ReplicaId, every_s: float, end_s: float) -> None:
        """Between steps it says from now on what its load is, as often as that, until then."""

        def say() -> None:
            replica = self.replicas[replica_id]
            if not replica.is_stepping:
                self.routing.on_load(replica_id, replica.core.load())
            if self.now < end_s:
                self._at(self.now + every_s, say)

        self._at(self.now + every_s, say)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._agenda:
            self.now, _, act = heapq.heappop(self._agenda)
            act()

    def snapshot(self, replica_id: ReplicaId) -> None:
        """The router gets a snapshot now."""
        replica = self.replicas[replica_id]
        snapshot = replica.log.snapshot(replica.core.load())
        self.routing.on_load(replica_id, snapshot.load)
        whole(self.routing.on_snapshot(replica_id, snapshot))

    def _info(self, num_blocks: int) -> ReplicaInfo:
        return ReplicaInfo(
            fingerprint=self.config.fingerprint,
            event_endpoint="",
            snapshot_endpoint="",
            num_blocks=num_blocks,
            max_model_len=10_000,
            max_batched_tokens=64,
            device="simulated",
            attention_backend="none",
        )

    def _arrive(self, name: RequestId, max_tokens: int) -> None:
        prompt, salt = self._prompts[name], self._salts[name]
        hashes = self.hasher.chain(self.hasher.root(salt=salt), prompt)
        query = RouteQuery(
            name, hashes, len(prompt), max_tokens=max_tokens, token_ids=prompt, cache_salt=salt
        )
        replica = self.replicas[self.routing.choose(query).replica_id]
        self.routing.routed(name, replica.replica_id)
        replica.core.submit(make_request(name, prompt, max_tokens=max_tokens, salt=salt))
        replica.admitted.append(name)
        self._where[name] = replica
        if not replica.is_stepping:
            self._step(replica)

    def _step(self, replica: _Replica) -> None:
        replica.clock.now_s = max(replica.clock.now_s, self.now)
        replica.is_stepping = True
        progress = replica.core.step()
        self._at(replica.clock.now_s, lambda: self._stepped(replica, progress))

    def _stepped(self, replica: _Replica, progress: list) -> None:  # type: ignore[type-arg]
        for each in progress:
            request = each.request
            if len(request.token_ids) == request.num_prompt_tokens + 1:
                self.routing.first_token(request.request_id, replica.replica_id, request.cached_tokens)
            if each.is_last:
                self._finish(request.request_id, request.token_ids)
        admitted, replica.admitted = tuple(replica.admitted), []
        batch = replica.log.flush(replica.core.load(admitted))
        self._at(self.now + self._event_delay_s, lambda: self._hear(replica.replica_id, batch))
        replica.is_stepping = False
        if replica.core.has_work:
            self._step(replica)

    def _hear(self, replica_id: ReplicaId, batch: object) -> None:
        self.routing.on_events(replica_id, batch)  # type: ignore[arg-type]

    def _finish(self, name: RequestId, token_ids: array[int]) -> None:
        self.num_answered += 1
        hashes = self.hasher.chain(self.hasher.root(salt=self._salts[name]), token_ids)
        num_output = len(token_ids) - len(self._prompts.pop(name))
        self.routing.finish(name, block_hashes=hashes, answers=(num_output,))

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), act))
