"""The whole decision, from packed tokens to a booked replica: hash + match + cost + reserve + predict.

Production's own objects, wired as the Router wires them: `ChainCache` and `Routing`. Knows no HTTP.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.router_index import SAMPLES, Advance, hasher_for, replica_name
from benchmarks.router_report import Row
from benchmarks.router_timing import Spread, spread_of
from benchmarks.router_workload import BLOCK_SIZE, Fleet, Hit
from cache.block_hash import hints
from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, StepTimeModel
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import ReplicaInfo
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint, RequestId
from replica.config import ReplicaConfig
from router.config import RouterConfig
from router.placement.routing import RouteQuery, Routing
from router.prompts.chain_cache import ChainCache, room_for

STEP_TIME = StepTimeModel(base_s=0.004, per_token_s=5e-5, per_attention_s=1e-9, per_sequence_s=1e-4)
BLOCKS_PER_REPLICA = 200_000
ORDER = SchedulingOrder(ReplicaConfig().scheduling_order)


class Decider:
    """One Router's deciding half, in front of a fleet on paper."""

    def __init__(self, fleet: Fleet, algorithm: HashAlgorithm) -> None:
        self.fleet = fleet
        self.hasher = hasher_for(algorithm)
        self.root = self.hasher.root()
        mark = Fingerprint("bench", "0", "bfloat16", "", BLOCK_SIZE, algorithm)
        # Replicas on paper send no heartbeats: none of them shall count as silent meanwhile.
        config = RouterConfig("bench", "bench", mark, seed=1, silent_after_s=3600.0)
        self.routing = Routing(config)
        # Their queues are in the order that ships: what longer prompts there would wait is part of the cost.
        info = ReplicaInfo(
            mark, "", "", BLOCKS_PER_REPLICA, 1 << 20, 8192, "paper", "none", scheduling_order=ORDER
        )
        self._names = [replica_name(index) for index in range(fleet.num_replicas)]
        self.routing.update_replicas(dict.fromkeys(self._names, info))
        self.forget_chains()
        self._rng = random.Random(1)
        self._num_requests = 0
        self._num_batches = 0
        self._in_flight: RequestId | None = None  # of the prompts that are timed

    def forget_chains(self) -> None:
        self.chains = ChainCache(self.hasher, room_for(self.hasher))

    def fill(self) -> None:
        for replica, tokens in self.fleet.conversations():
            self.tell(replica, tuple(hints(self.hasher.chain(self.root, tokens))))

    def tell(
        self, replica: int, stored: tuple[HashHint, ...] = (), removed: tuple[HashHint, ...] = ()
    ) -> None:
        self.routing.on_events(replica_name(replica), self.batch(stored, removed))

    def batch(self, stored: tuple[HashHint, ...], removed: tuple[HashHint, ...]) -> EventBatch:
        """As an engine with some work publishes it; its digest is not compared here."""
        self._num_batches += 1
        load = Load(
            queued_uncached_tokens=self._rng.randrange(4000),
            num_waiting=self._rng.randrange(3),
            num_running=self._rng.randrange(20),
            context_tokens=self._rng.randrange(50_000),
            free_blocks=BLOCKS_PER_REPLICA // 2,
            total_blocks=BLOCKS_PER_REPLICA,
            step_time=STEP_TIME,
        )
        return EventBatch(FORMAT_VERSION, 1, self._num_batches, stored, removed, Digest(len(stored)), load)

    def hash(self, prompt: array[int]) -> RouteQuery:
        self._num_requests += 1
        hashes = self.chains.chain(self.root, prompt)
        return RouteQuery(RequestId(f"request-{self._num_requests}"), hashes, len(prompt), max_tokens=100)

    def choose(self, query: RouteQuery) -> None:
        self._in_flight = self.routing.choose(query).request_id

    def decide(self, prompt: array[int]) -> None:
        self.choose(self.hash(prompt))

    def queue_everywhere(self, num_tokens: int) -> list[RequestId]:
        """Each replica gets a prompt of so many tokens that has no token yet."""
        queries = [
            RouteQuery(RequestId(f"at-{name}"), (), num_tokens, frozenset(self._names) - {name})
            for name in self._names
        ]
        return [self.routing.choose(query).request_id for query in queries]

    def spread(self, prompts: Sequence[array[int]], step: Callable[[array[int]], object]) -> Spread:
        """Of one step of each prompt's decision. Requests end in between, as they would."""
        return spread_of(self._with_ends(prompts, step))

    def _with_ends(
        self, prompts: Sequence[array[int]], step: Callable[[array[int]], object]
    ) -> Iterator[Callable[[], object]]:
        for prompt in prompts:
            yield partial(step, prompt)
            self._end()

    def _end(self) -> None:
        """Of the request that was booked last; nothing where none was."""
        if self._in_flight is not None:
            self.routing.first_token(self._in_flight, replica_name(0), 0)
            self.routing.finish(self._in_flight)
            self._in_flight = None


def rows(fleet: Fleet, sizes: Sequence[int], share: float, advance: Advance) -> Iterator[Row]:
    """Every row of the decision for this fleet. share: of the samples."""
    for algorithm in HashAlgorithm:
        section = f"decision, {fleet.num_replicas} replicas, {algorithm.value}"
        advance(f"{fleet.num_replicas} replicas, {algorithm.value}: filling")
        decider = Decider(fleet, algorithm)
        decider.fill()
        for num_blocks in sizes:
            samples = max(20, int(share * SAMPLES[num_blocks]))
            tokens = f"{num_blocks * BLOCK_SIZE // 1024}k"
            advance(f"{fleet.num_replicas} replicas, {algorithm.value}: {tokens} prompts")
            yield from _sized(decider, section, tokens, num_blocks, samples)


def _sized(decider: Decider, section: str, tokens: str, num_blocks: int, samples: int) -> Iterator[Row]:
    fleet = decider.fleet
    cold, half, held = ([fleet.prompt(num_blocks, hit, n) for n in range(samples)] for hit in Hit)
    yield Row(section, f"hash {tokens}", decider.spread(cold, decider.hash))
    decider.forget_chains()
    queries = {id(prompt): decider.hash(prompt) for prompt in half}
    choose = decider.spread(half, lambda prompt: decider.choose(queries[id(prompt)]))
    yield Row(section, f"choose {tokens}, half", choose)
    for hit, prompts in ((Hit.NONE, cold), (Hit.HALF, half), (Hit.ALL, held)):
        decider.forget_chains()
        yield Row(section, f"whole {tokens}, {hit.value}", decider.spread(prompts, decider.decide))
    decider.forget_chains()
    turns = [fleet.turns(num_blocks, number) for number in range(samples)]
    for last, _ in turns:
        decider.chains.chain(decider.root, last)
    following = [turn for _, turn in turns]
    yield Row(section, f"whole {tokens}, next turn", decider.spread(following, decider.decide))
    decider.forget_chains()
    longer = decider.queue_everywhere(2 * num_blocks * BLOCK_SIZE)
    yield Row(section, f"queued {tokens}, half", decider.spread(half, decider.decide))
    for request_id in longer:
        decider.routing.finish(request_id)
