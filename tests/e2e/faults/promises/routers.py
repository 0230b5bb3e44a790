"""One of two Routers killed: the other serves on, and the one that replaces it soon places as well.

Other settings of theirs alone: replicas stay, and so does what they have cached. And one more of them: those
that stay hear of it, since they divide keys' limits and replicas among all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tests.e2e.faults import checks, fleet
from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import Cluster, Spec, cluster
from tests.e2e.faults.injections import kill
from tests.e2e.faults.traffic import ClosedLoop, Outcome, cycle

CLIENTS = 32
WARM_UP_S = 8.0  # each prefix has been asked for
RECOVERY_S = 10.0  # promised
LEAST_WINDOW_S = 8.0  # of requests that a hit share is taken over
HEARD_WITHIN_S = 15.0  # of another number of Routers
OTHER_POLICY = "mooncake_min_ttft"  # which looks for prefixes, too
REPLACED_WITHIN_S = 120.0
LOOKS = 16  # each at a Router that the proxy chooses: at both


async def run(duration_s: float) -> list[Row]:
    """duration_s: of load, two thirds of it before and after the kill."""
    rows = await one_of_two_killed(fleet.spec(), duration_s)
    async with cluster(fleet.spec()) as running:
        rows += await other_settings(running)
        return [*rows, await one_more(running)]


async def one_of_two_killed(spec: Spec, duration_s: float) -> list[Row]:
    """With this deployment; as `run`."""
    window_s = max(LEAST_WINDOW_S, (duration_s - RECOVERY_S) / 2)
    async with cluster(spec) as running:
        rate = 0.6 * fleet.requests_per_s(2)
        load = ClosedLoop(running.url, cycle(fleet.questions()), num_clients=CLIENTS, rate_per_s=rate)
        async with load as traffic:
            await asyncio.sleep(WARM_UP_S + window_s)
            under_way = traffic.running
            killed_s = await kill(running.routers()[0])
            back = asyncio.create_task(running.until_ready())
            await asyncio.sleep(RECOVERY_S + window_s)
        back_s = await back
        return rows(traffic.outcomes, under_way, killed_s, window_s, back_s)


async def other_settings(running: Cluster) -> list[Row]:
    """Settings in the Routers' environment: Serve replaces Routers, under load, and nobody else."""
    replicas, routers = set(running.live_replicas()), set(running.routers())
    rate = 0.6 * fleet.requests_per_s(2)
    load = ClosedLoop(running.url, cycle(fleet.questions()), num_clients=CLIENTS, rate_per_s=rate)
    async with load as traffic:
        await asyncio.sleep(LEAST_WINDOW_S)
        began = time.monotonic()
        await running.change_routers({"policy": OTHER_POLICY})
        async with asyncio.timeout(2 * REPLACED_WITHIN_S):
            while routers & set(running.routers()):  # noqa: ASYNC110 - processes have no event to wait for
                await asyncio.sleep(0.1)
        await running.until_ready()
        ended = time.monotonic()
        await asyncio.sleep(LEAST_WINDOW_S)
    told = {(await running.version())["policy"] for _ in range(LOOKS)}
    before = hit_share(traffic.outcomes, began - LEAST_WINDOW_S, began)
    after = hit_share(traffic.outcomes, ended, ended + LEAST_WINDOW_S)
    what = "other settings of Routers alone"
    gone = replicas - set(running.live_replicas())
    return [
        Row(f"{what}: they have them", OTHER_POLICY, ", ".join(sorted(told)), told == {OTHER_POLICY}),
        checks.at_most(f"{what}: Routers replaced", ended - began, REPLACED_WITHIN_S),
        Row(f"{what}: replicas", "0 replaced", f"{len(gone)} of {len(replicas)} replaced", not gone),
        checks.zero_errors(f"{what}: client errors", traffic.outcomes),
        Row(
            f"{what}: hit share", ">= 95 % of before", f"{after:.3f} of {before:.3f}", after >= 0.95 * before
        ),
    ]


async def one_more(running: Cluster) -> Row:
    """Serve reconfigures no Router for another number of them."""
    num_routers = running.spec.routers + 1
    await running.scale("Router", num_routers)
    await running.until_ready()
    began, known = time.monotonic(), dict[str, int]()
    while [*known.values()] != [num_routers] * num_routers and time.monotonic() < began + 2 * HEARD_WITHIN_S:
        router, num_known = await running.routers_known()
        known[router] = num_known
        await asyncio.sleep(0.1)
    promise = f"one Router more: until each of {num_routers} knows of all"
    return checks.at_most(promise, time.monotonic() - began, HEARD_WITHIN_S)


def rows(
    outcomes: Sequence[Outcome], under_way: Sequence[Outcome], killed_s: float, window_s: float, back_s: float
) -> list[Row]:
    """What the clients saw: those that asked after the kill, and those who were being answered then."""
    later = [each for each in outcomes if each.sent_s >= killed_s]
    before = hit_share(outcomes, killed_s - window_s, killed_s)
    after = hit_share(outcomes, killed_s + RECOVERY_S, killed_s + RECOVERY_S + window_s)
    lost = checks.failures(under_way)
    return [
        checks.zero_errors("one of two Routers killed: requests sent after it", later),
        Row(
            "requests under way in it",
            "said, not promised",
            f"{sum(lost.values())} of {len(under_way)} lost"
            + "".join(f"; {count} x {what}" for what, count in lost.most_common(4)),
            None,
        ),
        checks.no_truncated_stream("streams that end early in silence", outcomes),
        Row(
            "hit share from 10 s after the kill on",
            ">= 95 % of before",
            f"{after:.3f} of {before:.3f} before",
            after >= 0.95 * before,
        ),
        checks.at_most("two Routers ready again", back_s, 120.0),
    ]


def hit_share(outcomes: Sequence[Outcome], since_s: float, until_s: float) -> float:
    """Share of prompt tokens found cached, of requests sent then."""
    seen = [each for each in outcomes if since_s <= each.sent_s < until_s and each.cached_tokens is not None]
    asked = sum(len(each.question.prompt) for each in seen)
    return sum(each.cached_tokens or 0 for each in seen) / asked if asked else float("nan")
