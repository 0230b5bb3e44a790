"""Serve's controller killed: requests do not pass through it, so they flow on, and it comes back."""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.e2e.faults import checks, fleet, processes
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, cluster
from tests.e2e.faults.injections import kill
from tests.e2e.faults.traffic import ClosedLoop, Traffic, cycle

SHARE = 0.7

CLIENTS = 16
LOAD = 0.3  # of two replicas' capacity
WARM_UP_S = 4.0
BACK_LIMIT_S = 120.0


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load around the death."""
    async with cluster(fleet.spec()) as running, load(running) as traffic:
        await asyncio.sleep(WARM_UP_S)
        first = running.pid_of(processes.CONTROLLER)
        killed_s = await kill(first)
        back_s = await _controller_is_back(running, first, killed_s)
        replica = (await running.replicas()).popitem()[1]
        await kill(replica)  # the new one must notice, and act
        replaced_s = await running.until_ready()
        await asyncio.sleep(max(0.0, killed_s + duration_s - time.monotonic()))
        traffic.stop()
    return [
        checks.zero_errors("Serve's controller killed, then a replica: client errors", traffic.outcomes),
        checks.no_truncated_stream("streams that end early in silence", traffic.outcomes),
        checks.at_most("the controller answers again", back_s, BACK_LIMIT_S),
        checks.at_most("and has replaced a replica killed then", replaced_s, BACK_LIMIT_S),
    ]


def load(running: Cluster) -> Traffic:
    """Little, so that a machine with a second node to run keeps up."""
    rate = LOAD * fleet.requests_per_s(2)
    return ClosedLoop(running.url, cycle(fleet.questions()), num_clients=CLIENTS, rate_per_s=rate)


async def _controller_is_back(running: Cluster, killed: int, killed_s: float) -> float:
    """Seconds until another one runs and says how the application is."""
    async with asyncio.timeout(BACK_LIMIT_S * 2):
        while True:
            others = [each.pid for each in running.processes(processes.CONTROLLER) if each.pid != killed]
            if others:
                try:
                    if (await running.applications())["status"] == "RUNNING":
                        return time.monotonic() - killed_s
                except (httpx.HTTPError, KeyError):
                    pass
            await asyncio.sleep(0.2)
