"""The proxy killed: nobody answers at its port, so Serve has to see it soon and start another."""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.e2e.faults import checks, fleet, processes
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, cluster
from tests.e2e.faults.injections import kill
from tests.e2e.faults.traffic import ClosedLoop, Traffic, cycle

SHARE = 0.4

CLIENTS = 8
LOAD = 0.2  # of two replicas' capacity
WARM_UP_S = 4.0
BACK_LIMIT_S = 20.0  # three health checks, and what starting takes on a busy machine
GIVE_UP_S = 120.0


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load after another proxy answers."""
    async with cluster(fleet.spec()) as running:
        async with load(running):
            await asyncio.sleep(WARM_UP_S)
            killed_s = await kill(running.pid_of(processes.HAPROXY))
            back_s = await _answers_again(running, killed_s)
            await running.until_ready()
        async with load(running) as traffic:
            await asyncio.sleep(duration_s)
            traffic.stop()
    return [
        checks.at_most("HAProxy killed: another one answers", back_s, BACK_LIMIT_S),
        checks.zero_errors("and from then on: client errors", traffic.outcomes),
    ]


def load(running: Cluster) -> Traffic:
    """Little: what is tried is who answers at the port."""
    rate = LOAD * fleet.requests_per_s(2)
    return ClosedLoop(running.url, cycle(fleet.questions()), num_clients=CLIENTS, rate_per_s=rate)


async def _answers_again(running: Cluster, killed_s: float) -> float:
    """Seconds until a Router is reached through the port."""
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            try:
                await running.version()
            except (httpx.HTTPError, ValueError):
                await asyncio.sleep(0.1)
            else:
                return time.monotonic() - killed_s
