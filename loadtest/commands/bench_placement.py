"""`python -m loadtest bench-placement`: the comparison that the project reports."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rich.console import Console

from loadtest.commands.options import (
    add_cache,
    add_output,
    add_results,
    add_trace,
    output_with_results_of,
    trace_of,
)
from loadtest.placement.bench import PARTS, Bench, bench_specs
from loadtest.placement.experiment import run_experiment
from loadtest.report_folder import check_folder

SUMMARY = "the project's own comparison"
DESCRIPTION = """\
The project's own comparison, in parts. Without arguments every policy on the trace before 4 replicas, up
to ten minutes on two cores; --full is all of it, which may be stopped and taken up again.
docs/benchmarks/placement.md has what it gave.

examples
  python -m loadtest bench-placement
  python -m loadtest bench-placement --full --part conversation --workers 8
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace(parser)
    add("--full", action="store_true", help="all replicas, loads and seeds of each part")
    add(
        "--part",
        action="append",
        choices=PARTS,
        help="only these parts; may be repeated (default: see above)",
    )
    add_cache(parser, "; also to run: 400k, 6M")
    add_output(parser, "bench", "a folder for each part: report.md, results.json and plots")
    add_results(parser)


def run(options: argparse.Namespace, console: Console) -> None:
    output = output_with_results_of(options)
    bench = Bench(options.full, options.part, options.cache_tokens)
    parts = {output.report / part.name: part for part in bench_specs(bench, trace_of(options))}
    for folder in parts:
        check_folder(folder)
    for folder, part in parts.items():
        console.print(f"[bold]{part.name}[/]: {part.purpose}", soft_wrap=True)
        run_experiment(part.spec, replace(output, report=folder), console, targets=part.targets)
