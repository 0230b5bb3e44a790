"""The connections that deltas take cut, all at once, again and again: streams go on, with the same text.

Nobody has died: a stream that was on one of them is continued from the tokens it has, mostly where it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from tests.e2e.faults import checks, fleet
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, cluster, total
from tests.e2e.faults.delta_relay import cut_all
from tests.e2e.faults.promises.events import DRIVER
from tests.e2e.faults.promises.replica_deaths import undisturbed
from tests.e2e.faults.traffic import ClosedLoop, cycle

SHARE = 0.5

CLIENTS = 24
LOAD = 0.5  # of two replicas' capacity
WARM_UP_S = 3.0
CUT_EVERY_S = 4.0  # about what a stream takes: hardly one is cut as often as it may be tried
BACK_LIMIT_S = 5.0


async def run(duration_s: float) -> list[Row]:
    """duration_s: of cuts under load."""
    async with cluster(replace(fleet.spec(), module=DRIVER)) as running:
        folder = running.server.temp / "wires"
        truth = await undisturbed(running, fleet.questions(), at_once=fleet.PREFIXES)
        before = await running.metrics()
        load = ClosedLoop(
            running.url, cycle(truth), num_clients=CLIENTS, rate_per_s=LOAD * fleet.requests_per_s(2)
        )
        async with load as traffic:
            await asyncio.sleep(WARM_UP_S)
            ends_s, num_cuts = time.monotonic() + duration_s, 0
            while not num_cuts or time.monotonic() < ends_s:
                num_cuts += 1
                cut_all(folder, num_cuts)
                await asyncio.sleep(CUT_EVERY_S)
        back_s = await _connected_again(running)
        after = await running.metrics()
    promise = f"connections for deltas cut {num_cuts} times under {CLIENTS} clients"
    return [
        checks.zero_errors(f"{promise}: client errors", traffic.outcomes),
        checks.no_truncated_stream(f"{promise}: streams that end early in silence", traffic.outcomes),
        checks.same_text(f"{promise}: text, greedy and sampled", traffic.outcomes, truth),
        _was_felt(before, after, num_cuts),
        checks.at_most("every Router is connected to every replica again", back_s, BACK_LIMIT_S),
    ]


def _was_felt(before: Mapping[str, float], after: Mapping[str, float], num_cuts: int) -> Row:
    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    lost = grown("warmpath_delta_channels_lost_total")
    continued = grown("warmpath_retries_total", why="deltas_lost", phase="mid_stream")
    measured = f"{lost:.0f} connections lost, {continued:.0f} streams went on from their tokens"
    return Row(
        "those cuts were felt", "in the middle of streams", measured, lost >= num_cuts and continued > 0
    )


async def _connected_again(running: Cluster) -> float:
    """Seconds until it is so; raises TimeoutError."""
    began_s, wanted = time.monotonic(), running.spec.routers * running.spec.replicas
    async with asyncio.timeout(6 * BACK_LIMIT_S):
        while await running.total("warmpath_replica_delta_channel") != wanted:  # noqa: ASYNC110 - a scrape
            await asyncio.sleep(0.1)
    return time.monotonic() - began_s
