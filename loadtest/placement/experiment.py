"""From a grid to its report: run what is missing, compare, print, write, draw."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cache.counted import counted
from loadtest.placement.comparison import Comparison
from loadtest.placement.errors import NoPlots
from loadtest.placement.grid import Grid
from loadtest.placement.policy_choice import DEFAULT, PolicyChoice
from loadtest.placement.progress import GridProgress
from loadtest.placement.report import (
    AGAINST_LOAD,
    BESIDE_IDEAL,
    groups,
    of_recording,
    print_tables,
    tables,
    told_too_late,
    write_report,
)
from loadtest.placement.store import ResultStore
from loadtest.placement.suites import GridSpec
from loadtest.placement.summary import WARM_UP_SHARE
from loadtest.placement.targets import Target, targets_table
from loadtest.report_folder import reporting
from loadtest.simulation.cell import IDEAL, Failure
from loadtest.simulation.run import run_cell
from loadtest.text_table import TextTable
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.trace_source import TraceSource

IDEAL_CHOICE = PolicyChoice(IDEAL)
RESULTS = Path(".bench/placement/cells")
REPORTS = Path(".bench/placement")


@dataclass(frozen=True, slots=True)
class Output:
    """Where an experiment's results go."""

    results: Path = RESULTS  # finished cells; may be shared by experiments, and deleted at any time
    report: Path = REPORTS / "report"
    with_plots: bool = True
    num_workers: int = os.cpu_count() or 1


def run_experiment(
    spec: GridSpec,
    output: Output,
    console: Console,
    *,
    targets: Callable[[Comparison], Iterable[Target]] | None = None,
) -> list[TextTable]:
    """Every cell's result, then tables on the console and tables, JSON and plots in a folder.

    targets: what to measure against the project's targets, in the last table. Raises NoPlots before
    anything runs, if plots are wanted but cannot be drawn; CellsFailed, NotKept and Stopped as `Grid.run`,
    and then neither prints nor writes a table; NotWritten when the tables have been printed.
    """
    plots = load_plots() if output.with_plots else None
    began_s = time.monotonic()
    comparison = run_grid(spec, output, console)
    took_s = time.monotonic() - began_s
    found = tables(comparison, IDEAL_CHOICE, ours=[p for p in spec.policies if p.name == DEFAULT])
    if targets is not None:
        found.append(targets_table(list(targets(comparison))))
    print_tables(found, console)
    head = conditions(spec, took_s)
    changes_s = [*(failure.at_s for failure in spec.failures), *(scaling.at_s for scaling in spec.scalings)]
    too_late = told_too_late(comparison, changes_s)
    if too_late:
        console.print(too_late, style="yellow", markup=False, soft_wrap=True)
        head = {**head, "not in all windows": too_late}
    with reporting(output.report):
        write_report(output.report, found, comparison, head)
        if plots is not None:
            _draw(plots, comparison, output.report)
    console.print(f"Tables, figures of every cell and plots: {output.report}", highlight=False, markup=False)
    return found


def run_grid(spec: GridSpec, output: Output, console: Console) -> Comparison:
    """Every cell's figures, with a progress bar.

    Raises as `Grid.run`, and before anything runs WorkloadError for a trace that cannot be read.
    """
    spec = replace(spec, workloads=tuple(workload.as_it_is() for workload in spec.workloads))
    for workload in spec.workloads:
        source = workload.open()  # else every cell's process would find out for itself
        if isinstance(source, TraceSource) and (told := of_recording(source.trace)):
            console.print(f"{workload.label}: {told}", highlight=False, markup=False, soft_wrap=True)
    cells = spec.cells()
    with GridProgress(console) as progress:
        Grid(run_cell, ResultStore(output.results), output.num_workers).run(
            list(dict.fromkeys(cell for _, _, cell in cells)), progress
        )
    comparison = Comparison()
    for setting, policy, cell in cells:
        # What was told, not what is stored: somebody may have tidied up since.
        comparison.add(setting, policy, cell.seed, progress.summaries[cell])
    return comparison


def conditions(spec: GridSpec, took_s: float) -> Mapping[str, Any]:
    """What the numbers depend on, for the head of a report."""
    return {
        "workloads": ", ".join(map(_workload, spec.workloads)),
        "seeds": ", ".join(map(str, spec.seeds)),
        "warm-up": f"the first {WARM_UP_SHARE:.1%} of each window is not counted",
        "machine simulated": spec.machine.describe(),
        "steps take longer on the first replicas": _listed(f"{factor:g} times" for factor in spec.slowdowns),
        "replicas die": _listed(map(_failure, spec.failures)),
        "the fleet changes": _listed(
            f"to {counted(scaling.num_replicas, 'replica')} at {scaling.at_s:g} s"
            for scaling in spec.scalings
        ),
        "KV events": "published" if spec.has_kv_events else "none, load alone: caches are imitated",
        "events reach routers after": f"{1e3 * spec.event_delay_s:g} ms",
        "requests reach replicas after": f"{1e3 * spec.dispatch_delay_s:g} ms",
        "this run": f"{took_s:.0f} s on {counted(os.cpu_count() or 1, 'core')}, "
        f"Python {platform.python_version()}",
    }


def _workload(workload: WorkloadRef) -> str:
    origin = "" if workload.is_generated else f" from {workload.source}"
    return f"{workload.label}{origin} ({counted(workload.num_requests, 'request')})"


def _failure(failure: Failure) -> str:
    told = f"r{failure.replica} at {failure.at_s:g} s"
    return told if math.isinf(failure.down_s) else f"{told} for {failure.down_s:g} s"


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "no"


def load_plots() -> Any:
    """The module that draws. Raises NoPlots if what it needs is not installed."""
    try:
        from loadtest.placement import plots
    except ModuleNotFoundError as error:
        raise NoPlots(error.name) from error
    return plots


def _draw(plots: Any, comparison: Comparison, folder: Path) -> None:
    for label, part in groups(comparison):
        name = _file_name(label)
        plots.plot_against_load(part, IDEAL_CHOICE, label, folder / f"{name}{AGAINST_LOAD}")
        plots.plot_beside_ideal(part, IDEAL_CHOICE, label, folder / f"{name}{BESIDE_IDEAL}")


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-").replace("--", "-")
