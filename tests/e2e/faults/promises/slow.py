"""One of three replicas ten times slower, at 60 % of what is left: the fleet's tail at most doubles.

Slowed from outside, by stopping and continuing its process. A simulated step is a sleep, which goes on while
the process is stopped: so of every ten steps' time it runs for less than one step, and takes one in each.
"""

from __future__ import annotations

import asyncio
import time

from tests.e2e.faults import checks, fleet
from tests.e2e.faults.checks import Row, percentile
from tests.e2e.faults.cluster import cluster
from tests.e2e.faults.injections import slowed
from tests.e2e.faults.traffic import OpenLoop, Outcome, cycle

FACTOR = 10.0
SETTLED_S = 5.0  # after the slowdown: from then on the promise holds
TIMES = 2.0
WARM_UP_S = 10.0
LEAST_S = 20.0  # of each phase: some 300 requests
# p99 of the healthy fleet's first token, of 0.1 to 0.4 s by the steps' lengths: beyond it the machine cannot
# even carry the load, everybody is slow, and nothing is shown.
HEALTHY_S = 1.5
PERIOD_S = FACTOR * (fleet.BASE_S + 0.005)  # ten steps
RUNS_S = fleet.BASE_S / 2  # of each period: less than a step


async def run(duration_s: float) -> list[Row]:
    """duration_s: half of it healthy, half slow."""
    phase_s = max(LEAST_S, duration_s / 2)
    rate = 0.6 * fleet.requests_per_s(2 + 1 / FACTOR)
    async with cluster(fleet.spec()) as running:
        replicas = await running.replicas()
        async with OpenLoop(running.url, cycle(fleet.questions()), rate_per_s=rate) as traffic:
            await asyncio.sleep(WARM_UP_S)
            healthy_s = time.monotonic()
            await asyncio.sleep(phase_s)
            victim = max(replicas, key=lambda each: sum(o.replica == each for o in traffic.running))
            slow_s = time.monotonic()
            async with slowed(replicas[victim], PERIOD_S / RUNS_S, period_s=PERIOD_S):
                await asyncio.sleep(SETTLED_S + phase_s)
                ends_s = time.monotonic()
                pace = await _tokens_per_s(traffic.running, victim)
    healthy = [each for each in traffic.outcomes if healthy_s <= each.sent_s < slow_s]
    slow = [each for each in traffic.outcomes if slow_s + SETTLED_S <= each.sent_s < ends_s]
    promise = f"one of three ten times slower, 60 % load, from {SETTLED_S:g} s after"
    errors = checks.zero_errors(f"{promise}: client errors", traffic.outcomes)
    before_s = percentile(_firsts(healthy), 0.99)
    if not before_s <= HEALTHY_S:
        why = f"this machine is too busy: p99 of the healthy fleet's first token is {before_s:.1f} s"
        return [checks.not_run(promise, f"<= {TIMES:g} times healthy", why), errors]
    on_it = sum(each.replica == victim for each in slow)
    return [
        _tail(f"{promise}: p99 of the first token", _firsts(healthy), _firsts(slow)),
        checks.at_most(
            f"{promise}: requests that went to it ({pace})", on_it / max(1, len(slow)), 0.02, "of all"
        ),
        errors,
    ]


def _tail(promise: str, healthy: list[float], slow: list[float]) -> Row:
    before, after = percentile(healthy, 0.99), percentile(slow, 0.99)
    times = after / before
    measured = f"{times:.2f} times: {before:.3f} s healthy, {after:.3f} s with it ({len(slow)} requests)"
    return Row(promise, f"<= {TIMES:g} times healthy", measured, times <= TIMES)


def _firsts(outcomes: list[Outcome]) -> list[float]:
    return [each.ttft_s for each in outcomes if each.ttft_s is not None]


async def _tokens_per_s(under_way: list[Outcome], victim: str) -> str:
    """How fast the slow replica's streams go, so that the harm is seen to be as large as it should be."""
    streams = [each for each in under_way if each.replica == victim and each.first_s is not None]
    if not streams:
        return "none under way at the end"
    now = time.monotonic()
    paces = [len(each.token_times) / (now - (each.first_s or now)) for each in streams]
    return f"{len(streams)} streams under way at the end, {percentile(paces, 0.5):.1f} events/s each"
