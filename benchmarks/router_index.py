"""The index beside Ray Serve's own: match, insert, remove, memory, with the same prompts.

Ray's is the prefix tree of its PrefixCacheAffinityRouter (Ray 2.60, private: seen in
ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree). In production it lives in an actor and
every call is a remote one; here it is called in this process, so only the data structures are compared. It
holds text, four characters for each token.

Knows indexes and prompts; knows neither load nor cost.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.memory import resident_bytes
from benchmarks.router_report import Row
from benchmarks.router_timing import Spread, spread_of, summary
from benchmarks.router_workload import BLOCK_SIZE, Fleet, Hit, as_text
from benchmarks.stopping import ctrl_c_is_ours
from cache.block_hash import BlockHasher, hint_view, hints
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.types import HashHint, ReplicaId
from router.index.hash_trie import HashTrie

RAY_MODULE = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree"
SAMPLES = {64: 300, 512: 300, 2048: 120}

Advance = Callable[[str], None]


def hasher_for(algorithm: HashAlgorithm) -> BlockHasher:
    return BlockHasher(Fingerprint("bench", "0", "bfloat16", "", BLOCK_SIZE, algorithm))


def replica_name(index: int) -> ReplicaId:
    return ReplicaId(f"replica-{index}")


class PackedIndex:
    """Ours, filled as events fill it: a prompt's blocks at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.hasher = hasher_for(HashAlgorithm.XXH3_128)
        self.trie = HashTrie()
        for index in range(fleet.num_replicas):
            self.trie.add_replica(replica_name(index))

    def fill(self) -> None:
        root = self.hasher.root()
        for replica, tokens in self.fleet.conversations():
            self.trie.store(replica_name(replica), hints(self.hasher.chain(root, tokens)))

    def chain(self, num_blocks: int, hit: Hit, number: int) -> Sequence[HashHint]:
        """As the router has it when it matches."""
        tokens = self.fleet.prompt(num_blocks, hit, number)
        return hint_view(self.hasher.chain(self.hasher.root(), tokens))

    def match(self, num_blocks: int, hit: Hit, samples: int) -> Spread:
        chains = [self.chain(num_blocks, hit, number) for number in range(samples)]
        expected = {Hit.NONE: 0, Hit.HALF: num_blocks // 2, Hit.ALL: num_blocks}[hit]
        assert all(max(self.trie.match(chain).values(), default=0) == expected for chain in chains)
        return spread_of([partial(self.trie.match, chain) for chain in chains])

    def insert_and_remove(self, num_blocks: int, samples: int) -> tuple[Spread, Spread]:
        """A prompt's blocks announced, and evicted: as tuples of numbers, as events are decoded."""
        chains = [tuple(self.chain(num_blocks, Hit.NONE, number)) for number in range(samples)]
        names = [replica_name(number % self.fleet.num_replicas) for number in range(samples)]
        pairs = list(zip(names, chains, strict=True))
        inserted = spread_of([partial(self.trie.store, name, chain) for name, chain in pairs])
        removed = spread_of([partial(self.trie.remove, name, chain[::-1]) for name, chain in pairs])
        return inserted, removed

    def predict(self, num_blocks: int, samples: int) -> Spread:
        chains = [self.chain(num_blocks, Hit.NONE, number) for number in range(samples)]
        calls = [
            partial(self.trie.predict, replica_name(number % self.fleet.num_replicas), chain, 1.0)
            for number, chain in enumerate(chains)
        ]
        result = spread_of(calls)
        self.trie.expire(2.0)
        return result

    def leave(self) -> tuple[Spread, int]:
        """One replica leaves: the calls that takes, and how many."""
        calls: list[Callable[[], object]] = [partial(self.trie.remove_replica, replica_name(0))]
        cpu_ns, wall_ns = [], []
        while calls or self.trie.is_sweeping:
            call = calls.pop() if calls else partial(self.trie.expire, 0.0)
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            call()
            cpu_ns.append(time.thread_time_ns() - cpu)
            wall_ns.append(time.perf_counter_ns() - wall)
        return summary(cpu_ns, wall_ns), len(cpu_ns)


class RayTree:
    """Ray's, filled as its router fills it: a prompt's text at a time."""

    def __init__(self, fleet: Fleet) -> None:
        """Raises ImportError where Ray has no such class."""
        self.fleet = fleet
        self.tree: Any = importlib.import_module(RAY_MODULE).PrefixTree()
        self.tree.add_tenants([replica_name(index) for index in range(fleet.num_replicas)], 0.0)
        self._now = 0.0

    def fill(self) -> None:
        for replica, tokens in self.fleet.conversations():
            self._insert(as_text(tokens), replica_name(replica))

    def _insert(self, text: str, name: str) -> None:
        self._now += 1.0  # a time of its own for each: it evicts all of one time together
        self.tree.insert(text, name, self._now)

    def match(self, num_blocks: int, hit: Hit, samples: int) -> Spread:
        texts = [as_text(self.fleet.prompt(num_blocks, hit, number)) for number in range(samples)]
        return spread_of([partial(self.tree.prefix_match, text) for text in texts])

    def insert_and_remove(self, num_blocks: int, samples: int) -> tuple[Spread, Spread]:
        texts = [as_text(self.fleet.prompt(num_blocks, Hit.NONE, number)) for number in range(samples)]
        names = [replica_name(number % self.fleet.num_replicas) for number in range(samples)]
        pairs = list(zip(texts, names, strict=True))
        inserted = spread_of([partial(self._insert, text, name) for text, name in pairs])
        evict = self.tree.evict_tenant_by_lru
        removed = spread_of([partial(evict, name, len(text)) for text, name in pairs])
        return inserted, removed

    def leave(self) -> Spread:
        return spread_of([partial(self.tree.remove_tenants, [replica_name(0)])])


def rows(fleet: Fleet, sizes: Sequence[int], share: float, advance: Advance) -> Iterator[Row]:
    """Every row of the index for this fleet. share: of the samples."""
    section = f"index, {fleet.num_replicas} replicas, {fleet.num_blocks:,} blocks"
    advance(f"{fleet.num_replicas} replicas: measuring memory")
    memory, their_memory = in_its_own_process(PackedIndex, fleet), in_its_own_process(RayTree, fleet)
    yield Row(
        section,
        "bytes per block, process growth",
        amount=memory.growth / memory.num_blocks,
        ray_amount=their_memory.growth / memory.num_blocks,
    )
    yield Row(section, "byte gauge / process growth", amount=_of_growth(memory))
    advance(f"{fleet.num_replicas} replicas: filling the index")
    ours = PackedIndex(fleet)
    ours.fill()
    advance(f"{fleet.num_replicas} replicas: filling Ray's tree")
    theirs = RayTree(fleet)
    theirs.fill()
    for num_blocks in sizes:
        samples, tokens = _samples(num_blocks, share), _tokens(num_blocks)
        advance(f"{fleet.num_replicas} replicas: {tokens} prompts matched")
        for hit in Hit:
            mine, other = (index.match(num_blocks, hit, samples) for index in (ours, theirs))
            yield Row(section, f"match {tokens}, {hit.value}", mine, other)
    # After all matches: the tree evicts its oldest text, which is what they are matched with.
    for num_blocks in sizes:
        samples, tokens = _samples(num_blocks, share), _tokens(num_blocks)
        advance(f"{fleet.num_replicas} replicas: {tokens} prompts come and go")
        inserted, removed = ours.insert_and_remove(num_blocks, samples)
        their_inserted, their_removed = theirs.insert_and_remove(num_blocks, samples)
        yield Row(section, f"insert {tokens}", inserted, their_inserted)
        yield Row(section, f"remove {tokens}", removed, their_removed)
        yield Row(section, f"predict {tokens}", ours.predict(num_blocks, samples))
    advance(f"{fleet.num_replicas} replicas: one leaves")
    spread, num_calls = ours.leave()
    yield Row(section, "a replica leaves", spread, theirs.leave(), note=f"over {num_calls} calls")


def _samples(num_blocks: int, share: float) -> int:
    return max(20, int(share * SAMPLES[num_blocks]))


def _tokens(num_blocks: int) -> str:
    return f"{num_blocks * BLOCK_SIZE // 1024}k"


def _of_growth(memory: Memory) -> float | None:
    """None for an index that fits into what its process had."""
    return memory.gauge / memory.growth if memory.growth else None


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one filled index, bytes."""

    growth: int  # the process's
    gauge: int  # what the index says itself; 0 if it says nothing
    num_blocks: int


def in_its_own_process(kind: type[PackedIndex] | type[RayTree], fleet: Fleet) -> Memory:
    """Fill one in a fresh process: here, memory freed by something else would hide what it takes."""
    with ctrl_c_is_ours():
        processes = multiprocessing.get_context("spawn").Pool(1)
    with processes as pool:
        return pool.apply(_grown, (kind, fleet))


def _grown(kind: type[PackedIndex] | type[RayTree], fleet: Fleet) -> Memory:
    kind(Fleet(1, 5_000)).fill()  # every length: what is allocated once, allocators' reserves
    gc.collect()
    before = resident_bytes()
    index = kind(fleet)
    index.fill()
    gc.collect()
    growth = resident_bytes() - before
    if isinstance(index, RayTree):
        return Memory(growth, 0, fleet.num_blocks)
    return Memory(growth, index.trie.num_bytes(), index.trie.num_entries)
