"""The queue's orders beside each other, on a simulated fleet behind production's Router.

Late binding holds requests at the Router, short ones first, so little is left to put in order at the engines;
sent at once, all of the queue is theirs. Paired: every order meets the same windows of requests.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

from benchmarks.schedule.rows import Advance, Line, Section
from cache.scheduling_order import SchedulingOrder
from loadtest.placement.suites import EXCERPT
from loadtest.simulation.cell import CellResult, CellSpec
from loadtest.simulation.machine import H100_8B
from loadtest.simulation.run import run_cell
from loadtest.workloads.reference import WorkloadRef

WORKLOAD = WorkloadRef(str(EXCERPT), num_requests=2_000, spread_ticks=True)
NUM_REPLICAS = 4
LOADS = (0.6, 0.85, 1.05)
BINDINGS = ("late", "at_once")


def measure(advance: Advance, seeds: int) -> Section:
    """Mean over seeds; each order's ratio to first come, seed by seed."""
    section = Section(
        f"Orders of the waiting queue: {WORKLOAD.label}, {NUM_REPLICAS} simulated replicas, {seeds} windows",
        ("mean TTFT, s", "p99, s", "mean / first come", "p99 / first come"),
    )
    for binding in BINDINGS:
        for load in LOADS:
            found: dict[SchedulingOrder, list[CellResult]] = {}
            for order in SchedulingOrder:
                advance(f"{binding}, load {load:g}, {order.value}")
                found[order] = [_cell(order, binding, load, seed) for seed in range(seeds)]
            for order, results in found.items():
                section.lines.append(_line(binding, load, order, results, found[SchedulingOrder.FIRST_COME]))
    return section


def _cell(order: SchedulingOrder, binding: str, load: float, seed: int) -> CellResult:
    return run_cell(
        CellSpec(
            WORKLOAD,
            num_replicas=NUM_REPLICAS,
            load=load,
            seed=seed,
            router_options=(("binding", binding),),
            machine=replace(H100_8B, scheduling_order=order),
        )
    )


def _line(
    binding: str,
    load: float,
    order: SchedulingOrder,
    results: list[CellResult],
    first_come: list[CellResult],
) -> Line:
    pairs = list(zip(results, first_come, strict=True))
    means = [ours.mean_ttft_s / theirs.mean_ttft_s for ours, theirs in pairs]
    tails = [ours.ttft_quantile_s(0.99) / theirs.ttft_quantile_s(0.99) for ours, theirs in pairs]
    cells = (
        f"{fmean(result.mean_ttft_s for result in results):.2f}",
        f"{fmean(result.ttft_quantile_s(0.99) for result in results):.1f}",
        _spread(means),
        _spread(tails),
    )
    return Line(f"{binding}, {load:g}: {order.value}", cells)


def _spread(ratios: list[float]) -> str:
    """Mean, and the standard deviation over seeds."""
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    return f"{fmean(ratios):.3f} ± {stdev(ratios):.3f}"
