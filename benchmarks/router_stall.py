"""How long one event loop is not at anybody's service while 64 requests and 10,000 blocks/s go through it.

    64 requests   tokens -> hash -> choose, some time with the engine, finish; and again
    64 engines    a batch every 50 ms each, decoded from the wire: as many blocks stored as removed
    a probe       sleeps a millisecond at a time, and notes how much later it wakes

A stall is the CPU time between two moments at which the loop looks for new events, collections of garbage
included; the probe's lateness adds what the machine's other processes take. Knows the router's deciding half;
knows no sockets.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

from benchmarks.router_decision import Decider
from benchmarks.router_index import Advance, replica_name
from benchmarks.router_report import Row
from benchmarks.router_timing import Spread, quantile
from benchmarks.router_workload import Fleet, Hit
from cache import heap
from cache.block_hash import hints
from cache.event_wire import decode_batch, encode
from cache.fingerprint import HashAlgorithm
from cache.types import HashHint

CONCURRENT = 64
BLOCKS_PER_S = 10_000
BATCH_INTERVAL_S = 0.05
PROMPT_BLOCKS = 512
MEAN_SERVICE_S = 0.5  # with the engine


class _TimedSelector(selectors.DefaultSelector):
    """Notes the thread's CPU time between two looks for events."""

    def __init__(self) -> None:
        super().__init__()
        self.busy_ns: list[int] = []
        self._began_ns = time.thread_time_ns()

    def select(self, timeout: float | None = None) -> Any:
        self.busy_ns.append(time.thread_time_ns() - self._began_ns)
        found = super().select(timeout)
        self._began_ns = time.thread_time_ns()
        return found


def rows(fleet: Fleet, seconds: float, advance: Advance) -> Iterator[Row]:
    section = f"event loop, {CONCURRENT} requests at once"
    advance("event loop: filling")
    decider = Decider(fleet, HashAlgorithm.XXH3_128)
    decider.fill()
    advance("event loop: running")
    selector = _TimedSelector()
    loop = asyncio.SelectorEventLoop(selector)
    try:
        run = _Run(decider)
        heap.settle()  # as a Router does before it serves
        loop.run_until_complete(run.warm_up())
        selector.busy_ns.clear()
        loop.run_until_complete(run.run(seconds))
    finally:
        loop.close()
    busy = sorted([time_ns / 1000 for time_ns in selector.busy_ns])
    late = sorted([lateness_s * 1e6 for lateness_s in run.lateness_s])
    rates = run.num_decisions / seconds, run.num_blocks / seconds
    note = "longest {:.1f} ms\n{:.0f} decisions/s\n{:,.0f} blocks/s".format(busy[-1] / 1000, *rates)
    yield Row(section, "stall, CPU time between two looks", _spread(busy), note=note)
    yield Row(section, "probe's lateness, wall time", _spread(late))


def _spread(ordered: list[float]) -> Spread:
    p50, p99 = quantile(ordered, 0.5), quantile(ordered, 0.99)
    return Spread(p50, p99, ordered[-1], p50, p99, len(ordered))


class _Run:
    def __init__(self, decider: Decider) -> None:
        self.decider = decider
        self.lateness_s: list[float] = []
        self.num_decisions = 0
        self.num_blocks = 0
        self._rng = random.Random(3)
        self._ends_at = 0.0
        fleet = decider.fleet
        kinds = list(Hit)
        self._prompts: list[array[int]] = [
            fleet.prompt(PROMPT_BLOCKS, kinds[number % 3], 1000 + number) for number in range(300)
        ]
        self._wires = self._make_wires()

    def _make_wires(self) -> deque[tuple[int, bytes]]:
        """Encoded batches, more than a run takes: each removes what its replica stored some batches ago."""
        per_batch = round(BLOCKS_PER_S * BATCH_INTERVAL_S / CONCURRENT)
        held: list[deque[tuple[HashHint, ...]]] = [deque() for _ in range(CONCURRENT)]
        wires: deque[tuple[int, bytes]] = deque()
        hasher, root = self.decider.hasher, self.decider.root
        for number in range(30_000 // CONCURRENT):
            for replica in range(CONCURRENT):
                tokens = array("i", [number, replica] * (8 * per_batch))
                stored = tuple(hints(hasher.chain(root, tokens)))
                held[replica].append(stored)
                removed = held[replica].popleft()[::-1] if len(held[replica]) > 20 else ()
                wires.append((replica, encode(self.decider.batch(stored, removed))))
        return wires

    async def warm_up(self) -> None:
        await self.run(0.5)
        self.lateness_s.clear()
        self.num_decisions = self.num_blocks = 0

    async def run(self, seconds: float) -> None:
        self._ends_at = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe())
            for index in range(CONCURRENT):
                group.create_task(self._request(index))
                group.create_task(self._engine(index))

    async def _probe(self) -> None:
        while time.perf_counter() < self._ends_at:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.lateness_s.append(time.perf_counter() - due)

    async def _request(self, index: int) -> None:
        await asyncio.sleep(self._rng.random() * MEAN_SERVICE_S)
        routing = self.decider.routing
        while time.perf_counter() < self._ends_at:
            placement = routing.choose(self.decider.hash(self._rng.choice(self._prompts)))
            self.num_decisions += 1
            routing.routed(placement.request_id, placement.ranks[0])
            await asyncio.sleep(min(4.0, self._rng.expovariate(1 / MEAN_SERVICE_S)))
            routing.first_token(placement.request_id, placement.ranks[0], 0)
            routing.finish(placement.request_id)

    async def _engine(self, index: int) -> None:
        await asyncio.sleep(self._rng.random() * BATCH_INTERVAL_S)
        while time.perf_counter() < self._ends_at and self._wires:
            replica, wire = self._wires.popleft()
            batch = decode_batch(wire)
            if replica < self.decider.fleet.num_replicas:
                self.decider.routing.on_events(replica_name(replica), batch)
            self.num_blocks += len(batch.stored)
            await asyncio.sleep(BATCH_INTERVAL_S)
