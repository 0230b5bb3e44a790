"""Options that several commands have, and what they mean. Knows argparse; runs nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from loadtest.placement import arguments as read
from loadtest.placement.errors import BadRequest
from loadtest.placement.experiment import RESULTS, Output
from loadtest.placement.suites import TRACE_VARIABLE, default_trace
from loadtest.report_folder import check_folder
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.reference import DEFAULT_REQUESTS, WorkloadRef


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Which trace, and how its arrivals are taken; `trace_of` reads both."""
    parser.add_argument(
        "--trace",
        type=read.trace,
        metavar="FILE",
        help="JSON lines, .gz or not: a recording of this service, or Mooncake's format (default: what "
        f"{TRACE_VARIABLE} names, else the excerpt that comes with the project)",
    )
    parser.add_argument(
        "--spread-ticks",
        action="store_true",
        help="spread requests that arrive at one instant evenly until the next tick of the trace's clock: "
        "Mooncake's ticks every 3 s (default: all at the instant, as published)",
    )


def trace_of(options: argparse.Namespace) -> WorkloadRef:
    """The trace asked for, or the default one. Raises BadRequest if there is no such file."""
    trace: WorkloadRef | None = options.trace
    if trace is None:
        path = default_trace()
        if not path.is_file():
            raise BadRequest(f"{TRACE_VARIABLE} names {str(path)!r}, which is not a file")
        trace = WorkloadRef.of_file(path)
    return replace(trace, spread_ticks=options.spread_ticks)


def add_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=read.several,
        default=DEFAULT_REQUESTS,
        metavar="N",
        help=f"in a window, an eighth of them to warm the caches (default: {DEFAULT_REQUESTS})",
    )


def add_cache(parser: argparse.ArgumentParser, note: str = "") -> None:
    """One size; `simulate` and `plan` take several."""
    parser.add_argument(
        "--cache-tokens",
        type=read.tokens,
        default=1_500_000,
        metavar="T",
        help=f"cache of one replica (default: 1.5M{note})",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        type=read.machine,
        default=H100_8B,
        metavar="NAME=VALUE,...",
        help="constants of the simulated machine, one for each replica, or with num_engines=N one that all "
        f"share and that computes N at full speed; without: {H100_8B.describe()}",
    )


def add_output(parser: argparse.ArgumentParser, name: str, files: str) -> None:
    """files: what a report is, for the help."""
    add = parser.add_argument
    defaults = Output()
    add(
        "--out",
        type=Path,
        default=defaults.report.parent / name,
        metavar="FOLDER",
        help=f"{files} (default: %(default)s)",
    )
    add("--no-plots", action="store_true", help="tables only; plots need matplotlib")
    add(
        "--workers",
        type=read.count,
        default=defaults.num_workers,
        metavar="N",
        help="processes (default: one per core, here %(default)s)",
    )


def add_results(parser: argparse.ArgumentParser) -> None:
    """For commands that run cells."""
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where finished cells are kept; delete it to start anew (default: %(default)s)",
    )


def output_of(options: argparse.Namespace) -> Output:
    """Raises BadRequest for a folder that cannot be written to: before anything runs, not after all of it."""
    check_folder(options.out, "--out")
    return Output(report=options.out, with_plots=not options.no_plots, num_workers=options.workers)


def output_with_results_of(options: argparse.Namespace) -> Output:
    """The same for commands that run cells."""
    output = output_of(options)
    check_folder(options.results, "--results")
    return replace(output, results=options.results)
