"""A plan in words, a table and a picture. Knows plans; decides nothing."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loadtest.placement.errors import PlacementError
from loadtest.placement.experiment import Output, load_plots
from loadtest.placement.plan import Plan, PlanRequest, curve_points, make_plan
from loadtest.placement.report import of_recording, print_tables
from loadtest.text_table import TextTable
from loadtest.workloads.request import Workload

SHARES = (0.5, 0.8, 0.9, 0.95, 1.0)  # of the hits that a cache without bound would have


def run_plan(request: PlanRequest, output: Output, console: Console) -> None:
    """Raises PlacementError if no fleet keeps the promise, after the tables that show why."""
    plots = load_plots() if output.with_plots else None
    with Progress(SpinnerColumn(), TextColumn("simulating fleets"), TimeElapsedColumn(), console=console):
        plan = make_plan(request, output.num_workers)
    found = [_fleets(request, plan), _sizes(plan)]
    print_tables(found, console)
    folder = output.report
    folder.mkdir(parents=True, exist_ok=True)
    document = {"fleets": [asdict(fleet) for fleet in plan.fleets], "hit_rate": curve_points(plan.curve)}
    (folder / "plan.json").write_text(json.dumps(document, indent=1) + "\n")
    if plots is not None:
        plots.plot_hit_rate(*curve_points(plan.curve), plan.busiest.name, folder / "hit-rate.png")
    console.print(f"Figures{'' if plots is None else ' and plot'}: {folder}", soft_wrap=True)
    best = plan.best
    if best is None:
        raise PlacementError(_why_not(request, plan))
    console.print(
        f"[bold]{best.num_replicas} replicas of {_millions(best.cache_tokens)} tokens[/] keep p99 at "
        f"{best.summary.p99_ttft_s:.3f} s, within {request.ttft_p99_s:g} s.",
        soft_wrap=True,
    )


def _fleets(request: PlanRequest, plan: Plan) -> TextTable:
    busiest = plan.busiest
    rows = [
        (
            _millions(fleet.cache_tokens),
            f"over {request.max_replicas}" if fleet.num_replicas is None else str(fleet.num_replicas),
            f"{fleet.summary.mean_ttft_s:.3f}",
            f"{fleet.summary.p99_ttft_s:.3f}",
            f"{100 * fleet.summary.hit_ratio:.1f}",
        )
        for fleet in plan.fleets
    ]
    return TextTable(
        f"Fewest replicas for p99 time to first token within {request.ttft_p99_s:g} s, "
        f"{request.policy.label}",
        ("cache per replica", "replicas", "mean TTFT, s", "p99 TTFT, s", "tokens from cache, %"),
        tuple(rows),
        f"Replayed: the busiest {len(busiest.requests)} requests, {_rate(busiest)}{_after(plan)}. "
        f"{of_recording(busiest)}Machine: {request.machine.describe()}",
    )


def _after(plan: Plan) -> str:
    if plan.num_warming:
        return f", after the {plan.num_warming} before them, which only warm the caches"
    return ", from empty caches"


def _rate(workload: Workload) -> str:
    return f"{workload.rate_per_s:.2f}/s" if workload.duration_s else "all at one instant"


def _sizes(plan: Plan) -> TextTable:
    rows = [
        (
            f"{100 * share:.0f} %",
            f"{100 * share * plan.curve.most:.1f}",
            _millions(plan.curve.size_for(share)),
        )
        for share in SHARES
    ]
    return TextTable(
        "Cache of the whole fleet that reaches so much of the hits that any cache could have",
        ("of all hits", "tokens from cache, %", "cache"),
        tuple(rows),
        "One least-recently-used cache over the whole trace, from its stack distances.",
    )


def _why_not(request: PlanRequest, plan: Plan) -> str:
    most = min(plan.fleets, key=lambda fleet: fleet.summary.p99_ttft_s)
    return (
        f"not even {request.max_replicas} replicas keep p99 within {request.ttft_p99_s:g} s: with "
        f"{_millions(most.cache_tokens)} tokens each it is {most.summary.p99_ttft_s:.3f} s. The longest "
        "prompts alone may take that long; then a faster machine would help, and more replicas would not."
    )


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.3g}M"
