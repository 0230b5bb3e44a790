"""A plan in words, a table and a picture. Knows plans; decides nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cache.counted import counted
from loadtest.placement.errors import PlacementError
from loadtest.placement.experiment import Output, load_plots
from loadtest.placement.plan import Fleet, Plan, PlanRequest, WholeTrace, curve_points, make_plan
from loadtest.placement.report import of_recording, print_tables
from loadtest.placement.stretch import Stretch
from loadtest.report_folder import remove_earlier, reporting, write_whole
from loadtest.text_table import TextTable

JSON, HIT_RATE = "plan.json", "hit-rate.png"
SHARES = (0.5, 0.8, 0.9, 0.95, 1.0)  # of the hits that a cache without bound would have


def run_plan(request: PlanRequest, output: Output, console: Console) -> None:
    """Raises WorkloadError, as `make_plan` and for a trace that changes meanwhile; PlacementError if no fleet
    keeps the promise, after the tables that show why; NotWritten when all has been printed."""
    plots = load_plots() if output.with_plots else None
    request = replace(request, trace=request.trace.as_it_is())
    with Progress(SpinnerColumn(), TextColumn("simulating fleets"), TimeElapsedColumn(), console=console):
        plan = make_plan(request, output.num_workers)
    print_tables(tables(request, plan), console)
    is_reused = plan.curve.most > 0
    if not is_reused:
        console.print("Nothing is ever reused: hits depend on no cache's size.", soft_wrap=True)
    if plan.best is not None:
        _tell(request, plan, plan.best, console)
    folder = output.report
    with reporting(folder):
        remove_earlier(folder, JSON, HIT_RATE)
        write_whole(folder / JSON, f"{json.dumps(document(request, plan), indent=1)}\n".encode())
        if plots is not None and is_reused:
            plots.plot_hit_rate(*curve_points(plan.curve), plan.trace.name, folder / HIT_RATE)
    console.print(
        f"Figures{' and plot' if plots is not None and is_reused else ''}: {folder}", soft_wrap=True
    )
    if plan.best is None:
        raise PlacementError(_why_not(request, plan))


def _tell(request: PlanRequest, plan: Plan, best: Fleet, console: Console) -> None:
    assert best.num_replicas is not None, "no fleet is the best that does not keep it"
    replicas, keep = _replicas_keep(best.num_replicas)
    console.print(
        f"[bold]{replicas} of {_millions(best.cache_tokens)} tokens[/] {keep} p99 at "
        f"{best.summary.p99_ttft_s:.3f} s, within {request.ttft_p99_s:g} s.",
        soft_wrap=True,
    )
    if best.one_more_p99_ttft_s is not None and best.one_more_p99_ttft_s > request.ttft_p99_s:
        console.print(
            f"One replica more places requests differently, and does not: {best.one_more_p99_ttft_s:.3f} s.",
            soft_wrap=True,
        )
    if plan.whole is not None:
        console.print(_of_all(plan.whole, best.stretch, request.ttft_p99_s), soft_wrap=True)


def tables(request: PlanRequest, plan: Plan) -> list[TextTable]:
    """Fleets; and cache sizes, unless nothing is ever reused."""
    return [_fleets(request, plan), *([_sizes(plan)] if plan.curve.most else [])]


def document(request: PlanRequest, plan: Plan) -> dict[str, object]:
    """All that was asked for, and what came out. JSON has no number without bound: that is the text "inf"."""
    trace = request.trace
    return {
        "request": {
            "trace": trace.source,
            "trace_sha256": trace.digest,
            "spread_ticks": trace.spread_ticks,
            "ttft_p99_s": request.ttft_p99_s,
            "cache_tokens": request.cache_tokens,
            "num_requests": request.num_requests,
            "max_replicas": request.max_replicas,
            "policy": request.policy.label,
            "machine": _finite(asdict(request.policy.machine_of(request.machine))),
        },
        "fleets": [{**asdict(fleet), "stretch": _finite(asdict(fleet.stretch))} for fleet in plan.fleets],
        "whole_trace": None if plan.whole is None else asdict(plan.whole),
        "hit_rate": curve_points(plan.curve) if plan.curve.most else None,  # None: nothing is ever reused
    }


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    return {name: str(value) if value == math.inf else value for name, value in values.items()}


def _fleets(request: PlanRequest, plan: Plan) -> TextTable:
    rows = [
        (
            _millions(fleet.cache_tokens),
            f"over {request.max_replicas}" if fleet.num_replicas is None else str(fleet.num_replicas),
            f"{fleet.summary.mean_ttft_s:.3f}",
            f"{fleet.summary.p99_ttft_s:.3f}",
            "" if fleet.one_more_p99_ttft_s is None else f"{fleet.one_more_p99_ttft_s:.3f}",
            f"{100 * fleet.summary.hit_ratio:.1f}",
            f"{fleet.stretch.engines:.1f}" if fleet.stretch.duration_s else "",
        )
        for fleet in plan.fleets
    ]
    return TextTable(
        f"Fewest replicas for p99 time to first token within {request.ttft_p99_s:g} s, "
        f"{request.policy.label}",
        (
            "cache per replica",
            "replicas",
            "mean TTFT, s",
            "p99 TTFT, s",
            "with one more",
            "tokens from cache, %",
            "replicas that the work fills",
        ),
        tuple(rows),
        f"{_replayed(plan.fleets)} {of_recording(plan.trace)}Machine: {request.machine.describe()}",
    )


def _replayed(fleets: Sequence[Fleet]) -> str:
    """Which stretch of the trace; each, where caches of different sizes leave different work."""
    sizes: dict[int, list[str]] = {}
    for fleet in fleets:
        sizes.setdefault(fleet.stretch.first, []).append(_millions(fleet.cache_tokens))
    stretches = {fleet.stretch.first: fleet.stretch for fleet in fleets}
    told = [
        _told(stretch) + (f" (for {', '.join(sizes[first])})" if len(sizes) > 1 else "")
        for first, stretch in stretches.items()
    ]
    num_requests, which = fleets[0].stretch.num_requests, "; or ".join(told)
    return (
        f"Replayed: the {counted(num_requests, 'request')} in a row with the most work per second, {which}."
    )


def _told(stretch: Stretch) -> str:
    came = f"from {stretch.began_s:.1f} s of the trace on, "
    if stretch.duration_s:
        came += f"{(stretch.num_requests - 1) / stretch.duration_s:.2f}/s"
    else:
        came += "all at one instant"
    if stretch.num_warming:
        return f"{came}, after the {stretch.num_warming} before them, which only warm the caches"
    return f"{came}, from empty caches"


def _of_all(whole: WholeTrace, stretch: Stretch, limit_s: float) -> str:
    told = (
        f"The same on all {counted(whole.num_requests, 'request')} of the trace: p99 "
        f"{whole.p99_ttft_s:.3f} s; of {stretch.num_requests} in a row at most {whole.worst_p99_ttft_s:.3f} s"
    )
    if whole.worst_p99_ttft_s <= limit_s:
        return f"{told}."
    return f"{told} (from {whole.worst_began_s:.1f} s on), [bold]above {limit_s:g} s[/]."


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
    replicas, keep = _replicas_keep(request.max_replicas)
    return (
        f"not even {replicas} {keep} p99 within {request.ttft_p99_s:g} s: with "
        f"{_millions(most.cache_tokens)} tokens each it is {most.summary.p99_ttft_s:.3f} s. The longest "
        "prompts alone may take that long; then a faster machine would help, and more replicas would not."
    )


def _replicas_keep(count: int) -> tuple[str, str]:
    return counted(count, "replica"), "keeps" if count == 1 else "keep"


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.3g}M"
