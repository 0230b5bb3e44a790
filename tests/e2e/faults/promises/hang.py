"""A replica that hangs, or whose engine's thread dies: seen within ten seconds, replaced, explained.

the thread hangs   the replica's own watchdog ends the process, and says in one line where it stood
the thread dies    it says of what, and ends the process itself
all of it hangs    Serve's health checks; nobody is left inside to say anything
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tests.e2e.faults import checks, fleet
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, cluster
from tests.e2e.faults.injections import paused
from tests.e2e.faults.mortal_engine import engine_thread, kill_engine
from tests.e2e.faults.processes import read
from tests.e2e.faults.promises.events import DRIVER
from tests.e2e.faults.threads import is_sleeping, stopped_thread
from tests.e2e.faults.traffic import OpenLoop, Outcome, cycle

SEEN_WITHIN_S = 10.0
BACK_LIMIT_S = 60.0
WARM_UP_S = 8.0
GIVE_UP_S = 60.0
STUCK, DIED = "engine thread is stuck", "engine thread died"


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load before and after each of the three; how long they take comes on top."""
    load_s = max(WARM_UP_S, duration_s / 6)
    async with cluster(replace(fleet.spec(), module=DRIVER)) as running:
        return [
            *await _hung(running, "hung engine thread", _thread, load_s, cause=STUCK),
            *await _hung(running, "dead engine thread", _dead_thread, load_s, cause=DIED),
            *await _hung(running, "hung process", _process, load_s),
        ]


async def _hung(
    running: Cluster,
    what: str,
    harm: Callable[[Cluster, int], Awaitable[float]],
    load_s: float,
    *,
    cause: str | None = None,
) -> list[Row]:
    """A replica hangs, or dies inside, under load at half of what the others can take.

    cause: what its log says of it, once; None: it cannot say anything.
    """
    lines_before = _lines(running, cause)
    rate = 0.5 * fleet.requests_per_s(2)
    async with OpenLoop(running.url, cycle(fleet.questions()), rate_per_s=rate) as traffic:
        await asyncio.sleep(load_s)
        replicas = await running.replicas()
        busiest = max(replicas, key=lambda each: sum(o.replica == each for o in traffic.running))
        hung_s = time.monotonic()
        seen_s = await harm(running, replicas[busiest]) - hung_s
        back_s = await running.until_ready(limit_s=GIVE_UP_S + BACK_LIMIT_S)
        await asyncio.sleep(load_s)
    lines = _lines(running, cause) - lines_before
    after = [each for each in traffic.outcomes if each.sent_s > hung_s + 2.0]
    rows = [
        checks.at_most(f"{what}: seen, and given up", seen_s, SEEN_WITHIN_S),
        checks.at_most(f"{what}: three ready again after that", back_s, BACK_LIMIT_S),
        checks.zero_errors(f"{what}: client errors", traffic.outcomes),
        _spared(f"{what}: requests sent to it from 2 s after", busiest, after),
    ]
    if cause is not None:
        rows.append(Row(f"{what}: lines that name the cause", "1", str(lines), lines == 1))
    return rows


async def _thread(running: Cluster, pid: int) -> float:
    """Stop its engine's thread inside a step. When its process was gone, `time.monotonic()`."""
    thread_id = engine_thread(running.server.temp / "wires", pid)
    while True:
        await asyncio.sleep(0.002)
        if not is_sleeping(thread_id):
            continue
        with stopped_thread(thread_id):
            await asyncio.sleep(0.002)
            if not is_sleeping(thread_id):
                continue  # it had left its step before it stood still
            async with asyncio.timeout(GIVE_UP_S):
                while _is_there(pid):  # noqa: ASYNC110 - no child of ours
                    await asyncio.sleep(0.02)
            return time.monotonic()


async def _dead_thread(running: Cluster, pid: int) -> float:
    """An error in its engine's thread that nobody has foreseen. When the process was gone."""
    kill_engine(running.server.temp / "wires", pid)
    async with asyncio.timeout(GIVE_UP_S):
        while _is_there(pid):  # noqa: ASYNC110 - no child of ours
            await asyncio.sleep(0.02)
    return time.monotonic()


async def _process(running: Cluster, pid: int) -> float:
    """Stop all of it. When Serve had given it up, `time.monotonic()`.

    It ends some five seconds later: Ray first asks a stopped process to end, which it cannot hear.
    """
    async with paused(pid), asyncio.timeout(GIVE_UP_S):
        while await _counts_on(running, pid):  # noqa: ASYNC110 - Serve tells nobody
            await asyncio.sleep(0.1)
        seen_s = time.monotonic()
        while _is_there(pid):  # noqa: ASYNC110 - no child of ours
            await asyncio.sleep(0.1)
    return seen_s


async def _counts_on(running: Cluster, pid: int) -> bool:
    """Whether Serve takes the process for a replica that serves."""
    replicas = (await running.applications())["deployments"]["Replica"]["replicas"]
    return any(each.get("pid") == pid and each["state"] == "RUNNING" for each in replicas)


def _is_there(pid: int) -> bool:
    process = read(pid)
    return process is not None and process.is_alive


def _spared(promise: str, hung: str, outcomes: list[Outcome]) -> Row:
    """What Routers still send it, though it has said nothing bad of itself: it must not look idle."""
    share = sum(each.replica == hung or each.replica is None for each in outcomes) / max(1, len(outcomes))
    return checks.at_most(promise, share, 0.05, "of all")


def _lines(running: Cluster, cause: str | None) -> int:
    """Of the replicas' logs, those that say so of one."""
    logs = running.server.temp.rglob("replica_warmpath_Replica_*.log")
    return sum(log.read_text(errors="replace").count(cause) for log in logs) if cause is not None else 0
