"""How many replicas, with how much cache each, a recorded trace needs for a time to first token.

The trace is replayed as it came, its busiest stretch, against the simulated cluster; the fewest replicas
that keep the promise are found in few tries (`fewest.py`). Every request of the stretch counts; what came
before it warms the caches, and where nothing did, as in a trace no longer than that, they start empty. What
is found is tried on the whole trace, unless that is far longer. Knows traces and simulations; prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from cache.errors import ServingError
from loadtest.placement.errors import BadRequest, PlacementError
from loadtest.placement.fewest import fewest
from loadtest.placement.policy_choice import SHIPPED, PolicyChoice
from loadtest.placement.stack_distance import HitCurve, hit_curve
from loadtest.placement.stretch import Stretch, busiest
from loadtest.placement.summary import CellSummary, summarize
from loadtest.placement.workers import end_at_once, worker_pool
from loadtest.simulation.cell import CellResult, CellSpec, Floats
from loadtest.simulation.machine import H100_8B, Machine
from loadtest.simulation.run import simulate
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload

CHECKED_STRETCHES = 10  # long at most is a trace that is replayed whole: as much as finding the fleet takes


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
    one_more_p99_ttft_s: float | None  # with one replica more than is enough: luck may have it longer
    stretch: Stretch  # that fleets with such caches were tried with


@dataclass(frozen=True, slots=True)
class WholeTrace:
    """What the best fleet makes of everything, from empty caches."""

    num_requests: int
    p99_ttft_s: float
    worst_p99_ttft_s: float  # of as many requests in a row as the stretch has
    worst_began_s: float  # of the trace: when the first of those came


@dataclass(frozen=True, slots=True)
class Plan:
    trace: Workload
    curve: HitCurve  # of the whole trace
    fleets: tuple[Fleet, ...]  # by cache size, smallest first
    whole: WholeTrace | None  # None: no fleet is enough, or there is no more than the stretch, or too much

    @property
    def best(self) -> Fleet | None:
        """The best of its fleets; None if no fleet keeps the promise."""
        return best_of(self.fleets)


def make_plan(request: PlanRequest, num_workers: int) -> Plan:
    """Raises WorkloadError for a trace that cannot be read, or that holds one request, and BadRequest for a
    cache or a machine that does not take the largest request, PlacementError where a process was killed."""
    trace = request.trace.trace()
    if len(trace.requests) < 2:
        raise WorkloadError(f"{request.trace.source}: one request is no traffic to plan for")
    sizes = sorted(request.cache_tokens)
    pool = worker_pool(min(num_workers, len(sizes)))
    try:
        found = pool.map(smallest_fleet, [request] * len(sizes), sizes)
        curve = hit_curve(trace)
        fleets = tuple(found)
        return Plan(trace, curve, fleets, whole_trace(request, trace, fleets))
    except ServingError as error:  # a request that no such replica takes
        raise BadRequest(str(error)) from None
    except BrokenProcessPool:
        raise PlacementError(
            "a process that simulated fleets was killed, maybe for its memory: with --workers 1, or one size "
            "of --cache-tokens at a time, fewer need it at once"
        ) from None
    finally:
        end_at_once(pool)


def best_of(fleets: Sequence[Fleet]) -> Fleet | None:
    """Fewest replicas, then the smallest cache."""
    enough = [fleet for fleet in fleets if fleet.num_replicas is not None]
    return min(enough, key=lambda fleet: (fleet.num_replicas, fleet.cache_tokens), default=None)


def smallest_fleet(request: PlanRequest, cache_tokens: int) -> Fleet:
    """With caches of that size. Raises ServingError for a request that no such replica takes."""
    trace = request.trace.trace()
    stretch = busiest(trace, request.num_requests, cache_tokens=cache_tokens, machine=request.machine)
    workload = stretch.cut(trace)

    @cache
    def tried(num_replicas: int) -> CellSummary:
        result = _simulate(request, workload, cache_tokens, num_replicas)
        return _summary(result, num_replicas, stretch.num_warming)

    found = fewest(lambda count: tried(count).p99_ttft_s, request.ttft_p99_s, request.max_replicas)
    if found is None:
        return Fleet(cache_tokens, None, tried(request.max_replicas), None, stretch)
    return Fleet(cache_tokens, found, tried(found), tried(found + 1).p99_ttft_s, stretch)


def whole_trace(request: PlanRequest, trace: Workload, fleets: Sequence[Fleet]) -> WholeTrace | None:
    """The best fleet, if there is one, on all of a trace that is neither the stretch itself nor too long."""
    best = best_of(fleets)
    if best is None or best.num_replicas is None:
        return None
    length = best.stretch.num_requests
    if not length < len(trace.requests) <= CHECKED_STRETCHES * length:
        return None
    ttft_s = _simulate(request, trace, best.cache_tokens, best.num_replicas).ttft_s
    last = len(ttft_s) - length
    worst = max(
        [*range(0, last, max(1, length // 8)), last],
        key=lambda first: _p99_s(ttft_s[first : first + length]),
    )
    worst_s = _p99_s(ttft_s[worst : worst + length])
    return WholeTrace(len(ttft_s), _p99_s(ttft_s), worst_s, trace.requests[worst].arrival_s)


def _simulate(request: PlanRequest, workload: Workload, cache_tokens: int, num_replicas: int) -> CellResult:
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
    return simulate(workload, spec)


def _summary(result: CellResult, num_replicas: int, num_warming: int) -> CellSummary:
    summary = summarize(result, num_replicas, num_warming=num_warming)
    return replace(summary, p99_ttft_s=_p99_s(result.ttft_s[num_warming:]))


def _p99_s(ttft_s: Floats) -> float:
    """What 99 of 100 do not exceed: between the two latest of fifty there are times that one exceeds."""
    return float(np.quantile(ttft_s, 0.99, method="inverted_cdf"))


def curve_points(curve: HitCurve, num_points: int = 60) -> tuple[Sequence[int], Sequence[float]]:
    """Cache sizes in tokens, evenly spaced in the logarithm up to where no more is gained, and hits."""
    largest = max(curve.size_for(1.0), curve.block_tokens)
    smallest = max(curve.block_tokens, largest // 10_000)
    sizes = [
        round(smallest * (1.05 * largest / smallest) ** (i / (num_points - 1))) for i in range(num_points)
    ]
    return sizes, [curve.hit_ratio(size) for size in sizes]
