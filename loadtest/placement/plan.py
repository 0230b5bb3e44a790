"""How many replicas, with how much cache each, a recorded trace needs for a time to first token.

The trace is replayed as it came, its busiest stretch, against the simulated cluster; the fewest replicas
that keep the promise are found by doubling and halving. Every request of the stretch counts; what came before
it warms the caches, and where nothing did, as in a trace no longer than that, they start empty. Knows traces
and simulations; prints nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np

from cache.errors import ServingError
from loadtest.placement.errors import BadRequest
from loadtest.placement.policy_choice import SHIPPED, PolicyChoice
from loadtest.placement.stack_distance import HitCurve, hit_curve
from loadtest.placement.summary import WARM_UP_SHARE, CellSummary, summarize
from loadtest.simulation.cell import CellSpec
from loadtest.simulation.machine import H100_8B, Machine
from loadtest.simulation.run import simulate
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload, WorkRequest


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned for."""

    trace: WorkloadRef  # all of it is read; how long a window is does not matter
    ttft_p99_s: float
    cache_tokens: tuple[int, ...] = (
        400_000,
        1_500_000,
        6_000_000,
    )  # of one replica: what there is to choose from
    num_requests: int = 4_000
    max_replicas: int = 256
    policy: PolicyChoice = SHIPPED
    machine: Machine = H100_8B


@dataclass(frozen=True, slots=True)
class Fleet:
    """The smallest fleet with caches of one size that keeps the promise."""

    cache_tokens: int  # of one replica
    num_replicas: int | None  # None: not even the largest fleet tried keeps it
    summary: CellSummary  # with that many replicas, or with the most


@dataclass(frozen=True, slots=True)
class Plan:
    busiest: Workload  # the stretch that fleets were tried with
    num_warming: int  # requests before it that warmed the caches
    curve: HitCurve  # of the whole trace
    fleets: tuple[Fleet, ...]  # by cache size, smallest first

    @property
    def best(self) -> Fleet | None:
        """Fewest replicas, then the smallest cache; None if no fleet keeps the promise."""
        enough = [fleet for fleet in self.fleets if fleet.num_replicas is not None]
        return min(enough, key=lambda fleet: (fleet.num_replicas, fleet.cache_tokens), default=None)


def make_plan(request: PlanRequest, num_workers: int) -> Plan:
    """Raises WorkloadError for a trace that cannot be read, or that holds one request, and BadRequest for a
    cache or a machine that does not take the largest request."""
    trace = request.trace.trace()
    if len(trace.requests) < 2:
        raise WorkloadError(f"{request.trace.source}: one request is no traffic to plan for")
    sizes = sorted(request.cache_tokens)
    with ProcessPoolExecutor(min(num_workers, len(sizes)), mp_context=get_context("spawn")) as pool:
        fleets = pool.map(smallest_fleet, [request] * len(sizes), sizes)
        curve = hit_curve(trace)
        try:
            _, num_warming = warmed(trace, request.num_requests)
            return Plan(busiest(trace, request.num_requests), num_warming, curve, tuple(fleets))
        except ServingError as error:  # a request that no such replica takes
            raise BadRequest(str(error)) from None


def busiest(trace: Workload, num_requests: int) -> Workload:
    """The stretch of so many requests that came in the least time; all of a shorter trace."""
    first = _first(trace, num_requests)
    return _from_0(trace, trace.requests[first : first + num_requests])


def warmed(trace: Workload, num_requests: int) -> tuple[Workload, int]:
    """The busiest stretch behind those that came before it, and how many they are. They warm the caches:
    as many as in a comparison's window of that length, where there are."""
    first = _first(trace, num_requests)
    num_warming = min(first, round(num_requests * WARM_UP_SHARE / (1.0 - WARM_UP_SHARE)))
    return _from_0(trace, trace.requests[first - num_warming : first + num_requests]), num_warming


def _first(trace: Workload, num_requests: int) -> int:
    """Where the busiest stretch begins."""
    requests = trace.requests
    starts = range(max(1, len(requests) - num_requests + 1))
    last = min(num_requests, len(requests)) - 1
    return min(starts, key=lambda i: requests[i + last].arrival_s - requests[i].arrival_s)


def _from_0(trace: Workload, requests: tuple[WorkRequest, ...]) -> Workload:
    return replace(trace, requests=requests).window(0.0, len(requests))


def smallest_fleet(request: PlanRequest, cache_tokens: int) -> Fleet:
    """Tries 1, 2, 4, ... replicas until the promise is kept, then halves the gap."""
    workload, num_warming = warmed(request.trace.trace(), request.num_requests)
    tried: dict[int, CellSummary] = {}

    def keeps(num_replicas: int) -> bool:
        if num_replicas not in tried:
            tried[num_replicas] = _simulate(request, workload, num_warming, cache_tokens, num_replicas)
        return tried[num_replicas].p99_ttft_s <= request.ttft_p99_s

    enough = 1
    while not keeps(enough):
        if enough == request.max_replicas:
            return Fleet(cache_tokens, None, tried[enough])
        enough = min(2 * enough, request.max_replicas)
    below = enough // 2 + 1 if enough > 1 else 1
    found = below + bisect_left(range(below, enough), True, key=keeps)
    return Fleet(cache_tokens, found, tried[found])


def _simulate(
    request: PlanRequest, workload: Workload, num_warming: int, cache_tokens: int, num_replicas: int
) -> CellSummary:
    spec = CellSpec(
        workload=replace(request.trace, num_requests=len(workload.requests)),
        num_replicas=num_replicas,
        load=1.0,  # not used: the requests come as they were recorded
        seed=0,
        policy=request.policy.name,
        policy_options=request.policy.options,
        router_options=request.policy.router_settings,
        cache_tokens=cache_tokens,
        machine=request.policy.machine_of(request.machine),
    )
    result = simulate(workload, spec)
    # What 99 of 100 do not exceed: between the two latest of fifty there are times that one of them exceeds.
    p99_s = float(np.quantile(result.ttft_s[num_warming:], 0.99, method="inverted_cdf"))
    return replace(summarize(result, num_replicas, num_warming=num_warming), p99_ttft_s=p99_s)


def curve_points(curve: HitCurve, num_points: int = 60) -> tuple[Sequence[int], Sequence[float]]:
    """Cache sizes in tokens, evenly spaced in the logarithm up to where no more is gained, and hits."""
    largest = max(curve.size_for(1.0), curve.block_tokens)
    smallest = max(curve.block_tokens, largest // 10_000)
    sizes = [
        round(smallest * (1.05 * largest / smallest) ** (i / (num_points - 1))) for i in range(num_points)
    ]
    return sizes, [curve.hit_ratio(size) for size in sizes]
