"""A cluster of simulated replicas behind simulated routers, from the first arrival to the last token.

    arrival -> a router (drawn) -> dispatch delay -> replica -> first token, ..., last token -> the router
                    ^------------- event delay <------ KV events and load

Replicas may die (their requests go on elsewhere, as the ingress would have them) and the fleet may change
its size. Knows who talks to whom and when; how a router decides and an engine works is production's code.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left

from cache.counted import counted
from cache.disciplines import DEFAULT, paged_cache
from cache.errors import ConfigError
from cache.event_log import EventLog
from cache.events import EventBatch, Load
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from loadtest.simulation.cell import CellResult, CellSpec
from loadtest.simulation.clock import EventQueue
from loadtest.simulation.crowd import Crowd
from loadtest.simulation.engine import HEARTBEAT_S, NEVER_FULL, SimEngine
from loadtest.simulation.host_memory import host_tier
from loadtest.simulation.recorder import Recorder
from loadtest.simulation.router_node import RouterNode
from loadtest.simulation.turns import Turn, TurnHasher, fingerprint, make_turns
from loadtest.workloads.request import Workload

# Of a fleet without a request these heartbeats are heard all the same: the first, while routers still look at
# what the last request has changed, and the last before somebody comes, from which they take what they know.
_HEARD_S = 10 * HEARTBEAT_S


class Cluster:
    """An `EngineListener`. `run` once."""

    def __init__(self, workload: Workload, spec: CellSpec, *, jumps: bool = True) -> None:
        """jumps: as `SimEngine` has it. Raises ConfigError for an unknown policy or option."""
        self._spec = spec
        self._jumps = jumps
        self._block_tokens = workload.block_tokens
        self._turns = make_turns(workload)
        self._queue = EventQueue()
        self._recorder = Recorder(self._turns)
        self._engines: list[SimEngine] = []  # all that ever were, by index
        self._seats: list[SimEngine] = []  # those that are members now, or have died
        self._coming_back: set[SimEngine] = set()  # of the dead: another will take the seat
        self._by_id: dict[ReplicaId, SimEngine] = {}
        self._infos: dict[ReplicaId, ReplicaInfo] = {}  # of the members
        self._router_of: dict[RequestId, RouterNode] = {}
        self._num_retries = 0
        self._num_arrived = 0
        self._num_inside = 0  # requests that have come and are not over
        self._quiet_since_s = 0.0  # when the last one ended, or the fleet changed since
        self._changes_s = sorted(_changes_s(spec))  # when the fleet does
        self._crowd = Crowd.of(spec.machine)
        # One stream of draws for the way to a router, the same whatever the policy; one per router.
        self._way = random.Random(f"{spec.seed} way")
        self._routers = [
            RouterNode(
                policy=spec.policy,
                policy_options=dict(spec.policy_options),
                router_options=dict(spec.router_options),
                peers=(number, spec.num_routers),
                block_tokens=workload.block_tokens,
                queue=self._queue,
                rng=random.Random(f"{spec.seed} router {number}"),
                dispatch=self._dispatch,
            )
            for number in range(spec.num_routers)
        ]

    def run(self, load_1_rate_per_s: float = 0.0) -> CellResult:
        """Simulate until the last request has its last token. Raises ConfigError if nobody is left for it."""
        spec, queue = self._spec, self._queue
        for seat in range(spec.num_replicas):
            self._seats.append(self._start_replica(self._slowdown(seat)))
        self._tell_members()
        for turn in self._turns:
            queue.at(turn.work.arrival_s, self._arrive, turn)
        for failure in spec.failures:
            queue.at(failure.at_s, self._fail, failure.replica, failure.down_s)
        for scaling in spec.scalings:
            queue.at(scaling.at_s, self._scale, scaling.num_replicas)
        while self._recorder.num_left:
            assert queue.step(), "requests are left, but nothing will happen any more"
        return self._recorder.result(
            self._engines,
            num_events=queue.num_events,
            num_retries=self._num_retries,
            load_1_rate_per_s=load_1_rate_per_s,
        )

    # -- a request's way --------------------------------------------------------------------------

    def _arrive(self, turn: Turn) -> None:
        self._num_arrived += 1
        self._num_inside += 1
        router = self._routers[self._way.randrange(len(self._routers))]
        self._router_of[turn.request_id] = router
        router.submit(turn)

    def _dispatch(self, router: RouterNode, turn: Turn, num_output: int, replica_id: ReplicaId) -> None:
        self._queue.at(
            self._queue.now + self._spec.dispatch_delay_s, self._deliver, router, turn, num_output, replica_id
        )

    def _deliver(self, router: RouterNode, turn: Turn, num_output: int, replica_id: ReplicaId) -> None:
        engine = self._by_id[replica_id]
        if turn.is_copy:
            self._router_of[turn.request_id] = router
        if not engine.is_alive:
            self._retry(turn, num_output, replica_id)
            return
        router.accepted(turn.request_id, replica_id)
        engine.submit(turn, num_output=num_output)

    def _retry(self, turn: Turn, num_output: int, dead: ReplicaId) -> None:
        if turn.is_copy:
            self._router_of.pop(turn.request_id).copy_over(turn)
            return
        self._num_retries += 1
        router = self._router_of[turn.request_id]
        router.submit(turn, num_output=num_output, excluded=frozenset({dead}))

    # -- what replicas say (EngineListener) -------------------------------------------------------

    def first_token(self, engine: SimEngine, turn: Turn, cached_tokens: int) -> None:
        if not turn.is_copy:
            self._recorder.first_token(turn, self._queue.now, engine.index, cached_tokens)
        self._router_of[turn.request_id].first_token(turn, engine.replica_id, cached_tokens)

    def finished(self, engine: SimEngine, turn: Turn) -> None:
        self._router_of.pop(turn.request_id).finished(turn)
        if turn.is_copy:
            return
        self._recorder.finished(turn, self._queue.now)
        self._num_inside -= 1
        self._quiet_since_s = self._queue.now

    def published(self, engine: SimEngine, batch: EventBatch) -> None:
        delay_s = self._spec.event_delay_s
        self._queue.at(self._queue.now + delay_s, self._hear, engine.replica_id, batch)

    def told_load(self, engine: SimEngine, load: Load) -> None:
        delay_s = self._spec.event_delay_s
        self._queue.at(self._queue.now + delay_s, self._hear_load, engine.replica_id, load)

    def between_steps(self, engine: SimEngine) -> None:
        pass

    def _hear(self, replica_id: ReplicaId, batch: EventBatch) -> None:
        for router in self._routers:
            router.heard(replica_id, batch)

    def _hear_load(self, replica_id: ReplicaId, load: Load) -> None:
        for router in self._routers:
            router.heard_load(replica_id, load)

    # -- who is there -----------------------------------------------------------------------------

    def _start_replica(self, slowdown: float) -> SimEngine:
        spec, machine, index = self._spec, self._spec.machine, len(self._engines)
        replica_id = ReplicaId(f"r{index}")
        mark = fingerprint(self._block_tokens)
        events = EventLog(epoch=index + 1)
        num_blocks = max(1, spec.cache_tokens // self._block_tokens)
        host = host_tier(machine, slowdown, self._block_tokens, events)
        cache = paged_cache(
            DEFAULT,
            num_blocks,
            TurnHasher(mark),
            block_size=self._block_tokens,
            sink=events if host is None else None,
            host=host,
        )
        engine = SimEngine(
            index,
            replica_id,
            machine,
            cache,
            num_blocks=num_blocks,
            queue=self._queue,
            listener=self,
            events=events,
            slowdown=slowdown,
            crowd=self._crowd,
            jumps=self._jumps,
            quiet_until=self._quiet_until if self._jumps else lambda: 0.0,
        )
        self._engines.append(engine)
        self._by_id[replica_id] = engine
        self._infos[replica_id] = ReplicaInfo(
            fingerprint=mark,
            event_endpoint="",
            snapshot_endpoint="",
            num_blocks=num_blocks,
            max_model_len=machine.max_model_len,
            max_batched_tokens=machine.max_batched_tokens,
            device="simulated",
            attention_backend="simulated",
            max_running=machine.max_running,
            max_waiting=NEVER_FULL,
            has_kv_events=spec.has_kv_events,
            machine="shared" if self._crowd is not None else "",
            machine_engines=self._crowd.num_engines if self._crowd is not None else 1.0,
            scheduling_order=machine.scheduling_order,
        )
        return engine

    def _slowdown(self, seat: int) -> float:
        return self._spec.slowdowns[seat] if seat < len(self._spec.slowdowns) else 1.0

    def _quiet_until(self) -> float:
        """No router looks before then at what idle replicas say. 0: somebody is there, or was lately."""
        heard_s = self._spec.event_delay_s + _HEARD_S
        is_lately = self._queue.now < self._quiet_since_s + heard_s
        if self._num_inside or is_lately or self._num_arrived == len(self._turns):
            return 0.0
        change = bisect_left(self._changes_s, self._queue.now)
        change_s = self._changes_s[change] if change < len(self._changes_s) else math.inf
        return min(change_s, self._turns[self._num_arrived].work.arrival_s) - heard_s

    def _tell_members(self) -> None:
        self._quiet_since_s = self._queue.now
        for router in self._routers:
            router.members(self._infos)

    def _fail(self, seat: int, down_s: float) -> None:
        """The replica in that seat dies; its requests go on elsewhere; another one may come."""
        if seat >= len(self._seats) or not self._seats[seat].is_alive:
            return  # it had left, or was down already
        engine = self._seats[seat]
        lost = engine.kill()
        self._infos.pop(engine.replica_id)
        for router in self._routers:
            router.lost(engine.replica_id)
        self._tell_members()
        for turn, num_output in lost:
            self._retry(turn, num_output, engine.replica_id)
        if down_s < float("inf"):
            self._coming_back.add(engine)
            self._queue.at(self._queue.now + down_s, self._replace, engine)
        self._require_somebody()

    def _replace(self, dead: SimEngine) -> None:
        """Unless its seat has gone since, or is somebody else's."""
        self._coming_back.discard(dead)
        if dead in self._seats:
            seat = self._seats.index(dead)
            self._seats[seat] = self._start_replica(self._slowdown(seat))
            self._tell_members()

    def _require_somebody(self) -> None:
        """Raises ConfigError where requests would wait for a replica for ever."""
        is_scaled_later = any(scaling.at_s >= self._queue.now for scaling in self._spec.scalings)
        if not (is_scaled_later or any(map(self._is_to_serve, self._seats))):
            left = self._recorder.num_left
            told = f"from {self._queue.now:g} s on no replica is left, but {counted(left, 'request')}"
            raise ConfigError("failures", self._spec.failures, told)

    def _is_to_serve(self, engine: SimEngine) -> bool:
        return engine.is_alive or engine in self._coming_back

    def _scale(self, num_replicas: int) -> None:
        """The newest leave first: no new request goes there, and those in flight end there. Who has died for
        good is none of the replicas that there are to be."""
        self._seats = [engine for engine in self._seats if self._is_to_serve(engine)]
        while len(self._seats) > num_replicas:
            self._infos.pop(self._seats.pop().replica_id, None)
        while len(self._seats) < num_replicas:
            self._seats.append(self._start_replica(self._slowdown(len(self._seats))))
        self._tell_members()


def _changes_s(spec: CellSpec) -> list[float]:
    """When somebody dies, comes back, joins or leaves."""
    deaths = [failure.at_s for failure in spec.failures]
    returns = [failure.at_s + failure.down_s for failure in spec.failures]
    return [*deaths, *returns, *(scaling.at_s for scaling in spec.scalings)]
