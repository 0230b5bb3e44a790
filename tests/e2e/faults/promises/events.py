"""KV events lost, repeated, late and out of order, and a Router that stands still: an index is a hint.

While it is wrong a prefix may be computed again; no request fails. Once the wire is good again each Router's
index is what the replicas hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import zmq
import zmq.asyncio

from cache.event_wire import decode_snapshot
from tests.e2e.faults import checks, fleet
from tests.e2e.faults.bad_wires import Wire
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, cluster
from tests.e2e.faults.injections import paused
from tests.e2e.faults.traffic import ClosedLoop, Outcome, Question, Traffic, answers, cycle

CLIENTS = 24
LOAD = 0.5  # of two replicas' capacity
BAD = Wire(lost=0.1, repeated=0.1, delayed=0.3, delay_s=0.5)
PAUSE_S = 5.0
AFTER_PAUSE_S = 3.0
QUIET_LIMIT_S = 10.0
DRIVER = "tests.e2e.faults.bad_wires"


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load, the pause of a Router included."""
    async with cluster(replace(fleet.spec(), module=DRIVER)) as running:
        folder = running.server.temp / "wires"
        return [
            *await _bad_wire(running, folder, max(5.0, duration_s - PAUSE_S - AFTER_PAUSE_S)),
            *await _router_stands_still(running, folder),
        ]


async def _bad_wire(running: Cluster, folder: Path, seconds: float) -> list[Row]:
    before = await running.metrics()
    BAD.write(folder)
    try:
        async with _load(running) as traffic:
            await asyncio.sleep(seconds)
    finally:
        Wire().write(folder)
    equal = await _index_equals_truth("events lost, repeated, late: index after it", running, folder)
    after = await running.metrics()
    repairs = sum(
        value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith("warmpath_event_snapshots")
    )
    share = (
        f"{BAD.lost:.0%} lost, {BAD.repeated:.0%} repeated, {BAD.delayed:.0%} late by up to {BAD.delay_s} s"
    )
    return [
        checks.zero_errors(f"KV events {share}: client errors", traffic.outcomes),
        Row("that wire was noticed", "snapshots fetched", f"{repairs:.0f} fetched", repairs > 0),
        equal,
        await _expected_equals_found("and what Routers expect of a prompt is what is found", running),
    ]


async def _router_stands_still(running: Cluster, folder: Path) -> list[Row]:
    router = running.routers()[0]
    async with _load(running) as traffic:
        await asyncio.sleep(1.0)
        async with paused(router):
            await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(AFTER_PAUSE_S)
    same = router in running.routers()
    return [
        checks.zero_errors(f"a Router stopped for {PAUSE_S:.0f} s: client errors", traffic.outcomes),
        checks.no_truncated_stream("streams that end early in silence", traffic.outcomes),
        await _index_equals_truth(
            f"index after it ({'the same process' if same else 'replaced by Serve'})", running, folder
        ),
    ]


def _load(running: Cluster) -> Traffic:
    rate = LOAD * fleet.requests_per_s(2)
    return ClosedLoop(running.url, cycle(fleet.questions()), num_clients=CLIENTS, rate_per_s=rate)


async def _index_equals_truth(promise: str, running: Cluster, folder: Path) -> Row:
    """Each Router's count of each replica's blocks, until it is what that replica itself says."""
    began = time.monotonic()
    while True:
        truth = await _held_by_replicas(running, folder)
        known = await _known_by_routers(running)
        if truth and known and all(blocks == truth for blocks in known.values()):
            seconds = time.monotonic() - began
            measured = f"{len(known)} Routers, {sum(truth.values())} blocks, after {seconds:.1f} s"
            return Row(promise, f"equal within {QUIET_LIMIT_S:g} s", measured, True)
        if time.monotonic() - began > QUIET_LIMIT_S:
            return Row(promise, f"equal within {QUIET_LIMIT_S:g} s", f"{known} and not {truth}", False)
        await asyncio.sleep(0.2)


async def _held_by_replicas(running: Cluster, folder: Path) -> dict[str, int]:
    """Number of hashes in each replica's own snapshot, by replica id."""
    context = zmq.asyncio.Context()
    try:
        return {
            replica_id: await _snapshot_size(context, (folder / f"{pid}.address").read_text())
            for replica_id, pid in (await running.replicas()).items()
        }
    finally:
        context.destroy(linger=0)


async def _snapshot_size(context: zmq.asyncio.Context, address: str) -> int:
    """Raises TimeoutError if the replica does not answer."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        await socket.send(b"snapshot")
        frames = await asyncio.wait_for(socket.recv_multipart(), 5.0)
    return len(decode_snapshot(frames).hashes)


async def _known_by_routers(running: Cluster) -> dict[str, dict[str, int]]:
    """Blocks of each replica by Router and replica id."""
    found: dict[str, dict[str, int]] = {}
    for name, value in (await running.metrics()).items():
        if name.startswith("warmpath_replica_known_blocks{"):
            labels = _labels(name)
            found.setdefault(labels["router"], {})[labels["replica"]] = int(value)
    return found


def _labels(sample: str) -> Mapping[str, str]:
    pairs = (each.partition("=") for each in sample.partition("{")[2].rstrip("}").split(","))
    return {key: value.strip('"') for key, _, value in pairs}


async def _expected_equals_found(promise: str, running: Cluster) -> Row:
    """Every question once more, one at a time: the Router's overlap beside the engine's cached tokens."""
    short = [Question(each.prompt, 1) for each in fleet.questions()]
    outcomes = list((await answers(running.url, short, at_once=1)).values())
    equal = sum(_is_as_expected(each) for each in outcomes)
    target = "all equal, to the block"
    return Row(promise, target, f"{equal} of {len(outcomes)}", equal == len(outcomes) > 0)


def _is_as_expected(outcome: Outcome) -> bool:
    expected = outcome.overlap_blocks
    return expected is not None and outcome.cached_tokens == expected * fleet.BLOCK_SIZE
