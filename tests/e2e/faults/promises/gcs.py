"""Ray's GCS killed: requests do not pass through it, so they flow on, and it comes back.

It dies on two local nodes with its state in a real Redis, and is restarted by a supervisor, as an operator
would have it. Without Redis nothing is promised: what happens then is measured, where time is given for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

import httpx

from tests.e2e.faults import checks, fleet, processes
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, Spec, cluster
from tests.e2e.faults.injections import kill
from tests.e2e.faults.promises.controller import load
from tests.e2e.faults.traffic import Outcome
from tests.servers import processes_below

SHARE = 1.3

WARM_UP_S = 4.0
BACK_LIMIT_S = 120.0
WINDOW_S = 150.0  # promised; shorter where less time is given
WITHOUT_REDIS_S = 90.0
WITHOUT_REDIS_FROM_S = 240.0  # given so much time, what happens without Redis is measured too
TWO_NODES = "tests.e2e.faults.two_nodes"


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load around the death."""
    window_s = min(WINDOW_S, duration_s)
    promise = f"GCS killed, state in Redis, two nodes, {window_s:.0f} s: client errors"
    if shutil.which("redis-server") is None:
        rows = [checks.not_run(promise, "0 errors", "redis-server is not installed")]
    else:
        rows = await _with_redis(promise, window_s)
    if duration_s >= WITHOUT_REDIS_FROM_S:
        rows.append(await _without_redis())
    return rows


async def _with_redis(promise: str, window_s: float) -> list[Row]:
    async with cluster(_two_nodes()) as running, load(running) as traffic:
        await asyncio.sleep(WARM_UP_S)
        first = running.pid_of(processes.GCS)
        killed_s = await kill(first)
        back_s = await _is_back(running, first, killed_s)
        await asyncio.sleep(max(0.0, killed_s + window_s - time.monotonic()))
        replica = (await running.replicas()).popitem()[1]
        await kill(replica)
        replaced_s = await running.until_ready()
        traffic.stop()
    return [
        checks.zero_errors(promise, traffic.outcomes),
        checks.no_truncated_stream("streams that end early in silence", traffic.outcomes),
        checks.at_most("the GCS answers again, 5 s of them until its restart", back_s, BACK_LIMIT_S),
        checks.at_most("and a replica killed then is replaced", replaced_s, BACK_LIMIT_S),
    ]


async def _without_redis() -> Row:
    """How long requests are answered with the GCS gone for good."""
    spec = fleet.spec()
    seen = "nothing asked"
    try:
        async with cluster(spec) as running:
            async with load(running) as traffic:
                await asyncio.sleep(WARM_UP_S)
                killed_s = await kill(running.pid_of(processes.GCS))
                await asyncio.sleep(WITHOUT_REDIS_S)
            seen = _what_failed(traffic.outcomes, killed_s)
            await _end_orphans(running)
            raise _Spent
    except _Spent:
        pass
    return Row("GCS killed, no Redis, not restarted", "measured, not promised", seen, None)


async def _end_orphans(running: Cluster) -> None:
    """HAProxy and Ray's agents may outlive the node that started them."""
    for line in processes_below(running.server.temp):
        pid = int(line.partition(":")[0])
        if pid != running.server.process.pid:
            with contextlib.suppress(ProcessLookupError):
                await kill(pid)


class _Spent(Exception):
    """This cluster cannot be used again."""


def _what_failed(outcomes: Sequence[Outcome], killed_s: float) -> str:
    failed = [each for each in outcomes if each.failure is not None]
    if not failed:
        return f"0 errors of {len(outcomes)} in {WITHOUT_REDIS_S:.0f} s"
    first_s = min(each.ended_s or each.sent_s for each in failed) - killed_s
    kinds = ", ".join(f"{count} x {what}" for what, count in checks.failures(failed).most_common(3))
    return f"first error after {first_s:.0f} s, {len(failed)} of {len(outcomes)} requests in all ({kinds})"


def _two_nodes() -> Spec:
    return replace(fleet.spec(), module=TWO_NODES, proxy_location="HeadOnly")


async def _is_back(running: Cluster, killed: int, killed_s: float) -> float:
    """Seconds until another one runs and Serve's controller, found through it, answers."""
    async with asyncio.timeout(BACK_LIMIT_S * 2):
        while True:
            if any(each.pid != killed for each in running.processes(processes.GCS)):
                try:
                    await running.applications()
                    return time.monotonic() - killed_s
                except (httpx.HTTPError, KeyError):
                    pass
            await asyncio.sleep(0.2)
