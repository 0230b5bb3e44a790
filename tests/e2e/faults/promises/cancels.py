"""Clients that hang up: their blocks are free within a quarter of a second, and ten thousand leave nothing.

    streams   all at once hang up in the middle of their answers: how long until no block is in use
    HTTP      clients hang up while they wait, while they listen, and in the moment they connect
    inside    the rest of ten thousand, through dispatcher, late binding and an engine in this process

Steps of the simulated engine are shorter than 100 ms: a block that a step computes is freed after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cache.block_hash import BlockHasher
from cache.errors import ServingError
from cache.event_log import EventLog
from cache.events import EventBatch
from cache.messages import Delta, GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.job import Job
from router.metrics import RouterMetrics
from router.placement.routing import Routing
from tests.e2e.faults import fleet, processes
from tests.e2e.faults.checks import Row, at_most, percentile
from tests.e2e.faults.cluster import Cluster, cluster, total
from tests.e2e.faults.traffic import Question, ask, clients
from tests.fakes.engine import fingerprint, sim_config
from tests.fakes.router import config, info, replica_id

NUM_CANCELS = 10_000  # over HTTP and inside, together
FREE_LIMIT_S = 0.25
NUM_STREAMS = 12  # that hang up together
CLIENTS = 32
QUIET_LIMIT_S = 10.0
DESCRIPTORS_SPARE = 8  # open files more than before that are no leak: connections kept between processes
_POLL_S = 0.01
_LONG_TOKENS = 400


async def run(duration_s: float) -> list[Row]:
    async with cluster(fleet.spec()) as running:
        await _answer_some(running)
        before = _descriptors(running)
        freed_s = [await _time_to_free(running, seed) for seed in range(max(3, round(duration_s / 4)))]
        num_http = await _hang_up(running, 0.5 * duration_s)
        left = await _left_over(running)
        spare = _descriptors(running) - before
    num_inside = max(0, NUM_CANCELS - num_http)
    inside = await cancel_inside(num_inside)
    return [
        at_most(
            f"cancels: {NUM_STREAMS} streams hang up: until their blocks are free, slowest of {len(freed_s)}",
            percentile(freed_s, 1.0),
            FREE_LIMIT_S,
        ),
        _nothing(f"cancels: {num_http} clients hung up: requests, reservations, blocks left", left),
        at_most("cancels: open files more than before", spare, DESCRIPTORS_SPARE, "files"),
        _nothing(f"cancels: {num_inside} more inside: requests, reservations, blocks, tasks left", inside),
    ]


def _nothing(promise: str, left: dict[str, float]) -> Row:
    found = ", ".join(f"{name} {count:g}" for name, count in left.items() if count)
    return Row(promise, "none", found or "none", not found)


# --- over HTTP ----------------------------------------------------------------------------------------


async def _answer_some(running: Cluster) -> None:
    """So that connections, tokenizers and fits that stay are there before anything is counted."""
    draw = random.Random(0)
    async with clients() as client:
        await asyncio.gather(*(ask(client, running.url, _question(draw, 8)) for _ in range(CLIENTS)))


def _question(draw: random.Random, max_tokens: int) -> Question:
    return Question(tuple(draw.choices(range(10, 1000), k=draw.randint(100, 400))), max_tokens)


async def _time_to_free(running: Cluster, seed: int) -> float:
    """Seconds from hanging up on streams until a Router has heard that no block is in use."""
    draw = random.Random(f"free {seed}")
    async with clients() as client:
        asking = [
            asyncio.create_task(ask(client, running.url, _question(draw, _LONG_TOKENS)))
            for _ in range(NUM_STREAMS)
        ]
        try:
            await _until(running, lambda now: now.running >= NUM_STREAMS, QUIET_LIMIT_S)
        finally:
            for task in asking:
                task.cancel()
            hung_up_s = time.monotonic()
            await asyncio.gather(*asking, return_exceptions=True)
    return await _until(running, lambda now: not now.running and not now.used, QUIET_LIMIT_S) - hung_up_s


@dataclass(frozen=True, slots=True)
class _Seen:
    """The fleet as one Router has it."""

    running: int
    used: float  # of all blocks, summed over replicas


async def _until(running: Cluster, holds: Callable[[_Seen], bool], limit_s: float) -> float:
    """`time.monotonic()` when a Router was asked whose answer satisfied it. Raises TimeoutError."""
    async with httpx.AsyncClient(timeout=10) as client, asyncio.timeout(limit_s):
        while True:
            asked_s = time.monotonic()
            answer = (await client.get(f"{running.url}/dashboard/data")).raise_for_status().json()
            replicas = answer["fleet"]["replicas"]
            if holds(_Seen(sum(r["running"] for r in replicas), sum(r["used"] for r in replicas))):
                return asked_s
            await asyncio.sleep(_POLL_S)


async def _hang_up(running: Cluster, seconds: float) -> int:
    """Clients that ask and hang up, again and again; how often they did."""
    end_s = time.monotonic() + seconds
    async with clients() as client:
        counts = await asyncio.gather(
            *(_one_client(client, running.url, random.Random(number), end_s) for number in range(CLIENTS))
        )
    return sum(counts)


async def _one_client(client: httpx.AsyncClient, url: str, draw: random.Random, end_s: float) -> int:
    num_cancelled = 0
    while time.monotonic() < end_s:
        task = asyncio.create_task(ask(client, url, _question(draw, _LONG_TOKENS)))
        await asyncio.sleep(draw.choice((0.0, 0.01, 0.05, 0.2, 0.6)) * draw.uniform(0.5, 1.5))
        num_cancelled += task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return num_cancelled


async def _left_over(running: Cluster) -> dict[str, float]:
    """What is still there once it had time to be quiet, by name."""
    names = (
        "warmpath_held_requests",
        "warmpath_replica_in_flight",
        "warmpath_replica_unseen",
        "warmpath_replica_running",
        "warmpath_replica_waiting",
        "warmpath_replica_used_ratio",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )
    left: dict[str, float] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(QUIET_LIMIT_S):
            while True:
                samples = await running.metrics()
                left = {name: total(samples, name) for name in names}
                if not any(left.values()):
                    return left
                await asyncio.sleep(0.2)
    return left


def _descriptors(running: Cluster) -> int:
    """Files and sockets that Routers and replicas have open."""
    pids = [*running.routers(), *(each.pid for each in running.processes(processes.REPLICA))]
    return sum(len(list((Path("/proc") / str(pid) / "fd").iterdir())) for pid in pids)


# --- inside one process -------------------------------------------------------------------------------

_SIM = SimConfig(base_s=0.002, per_token_s=1e-6, per_attention_s=0.0, per_sequence_s=1e-5)
_NAME = replica_id(0)
_AT_ONCE = 64


class _Calls:
    """`ReplicaCalls` to one engine in this process."""

    def __init__(self, engine: Engine, routing: Routing) -> None:
        self._engine = engine
        self._routing = routing

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self._routing.routed(request.request_id, _NAME)
        async with contextlib.aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta


@dataclass
class _Inside:
    """One Router's core over one engine."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        mark = fingerprint(16)
        self.hasher = BlockHasher(mark)
        settings = sim_config(1024, sim=_SIM, block_size=16, max_running=32, max_waiting=64)
        log = EventLog(1)
        core = EngineCore(SimRunner(settings.sim, block_size=16), settings, self.hasher, sink=log)
        self.engine = Engine(core, settings, events=log, publish=self._publish)
        router = config(fingerprint=mark)
        self.routing = Routing(router)
        calls = _Calls(self.engine, self.routing)
        self.dispatcher = Dispatcher(
            router, self.routing, calls, self.hasher, RouterMetrics([], []), time.monotonic
        )
        self.routing.update_replicas(
            {_NAME: info(fingerprint=mark, num_blocks=1024, max_running=32, max_waiting=64)}
        )

    def _publish(self, batch: EventBatch) -> None:
        self.loop.call_soon_threadsafe(self.routing.on_events, _NAME, batch)


async def cancel_inside(count: int) -> dict[str, float]:
    """So many generations cancelled at any moment of their life; what is left of them, by name."""
    tasks_before = len(asyncio.all_tasks())
    inside = _Inside()
    async with inside.engine:
        turns = iter(range(count))
        await asyncio.gather(*(_cancelling(inside, turns, number) for number in range(_AT_ONCE)))
        left = _left_inside(inside, tasks_before)
        for _ in range(round(QUIET_LIMIT_S / 0.05)):
            if not any(left.values()):
                break
            await asyncio.sleep(0.05)
            left = _left_inside(inside, tasks_before)
    inside.dispatcher.close()
    return left


def _left_inside(inside: _Inside, tasks_before: int) -> dict[str, float]:
    seen, stats, load = inside.routing.statistics(), inside.engine.stats(), inside.engine.load()
    return {
        "in flight": seen.in_flight,
        "held": seen.held,
        "unseen": sum(replica.unseen for replica in seen.replicas),
        "running": load.num_running,
        "waiting": load.num_waiting,
        "blocks in use": stats.cache.used,
        "index entries that no block has": max(0, seen.index_entries - stats.cache.cached),
        "tasks": max(0, len(asyncio.all_tasks()) - tasks_before),
    }


async def _cancelling(inside: _Inside, turns: Iterator[int], number: int) -> None:
    draw = random.Random(number)
    for turn in turns:
        task = asyncio.create_task(_listen(inside, RequestId(f"{number}-{turn}"), draw))
        await asyncio.sleep(draw.choice((0.0, 0.0, 0.001, 0.01, 0.03)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _listen(inside: _Inside, name: RequestId, draw: random.Random) -> None:
    prompt = array("i", draw.choices(range(10, 1000), k=draw.randint(1, 200)))
    hashes = inside.hasher.chain(inside.hasher.root(), prompt)
    job = Job(name, prompt, hashes, SamplingParams(max_tokens=_LONG_TOKENS, ignore_eos=True), seed=1)
    with contextlib.suppress(ServingError):  # busy: not what is asked here
        async with contextlib.aclosing(inside.dispatcher.start(job).deltas()) as deltas:
            async for _ in deltas:
                pass
