"""`python -m loadtest tune`: a budget of settings for every policy's knobs."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from rich.console import Console

from loadtest.commands.options import (
    add_cache,
    add_output,
    add_requests,
    add_results,
    add_trace,
    output_with_results_of,
    trace_of,
)
from loadtest.placement import arguments as read
from loadtest.placement.bench import tuning_spec
from loadtest.placement.errors import BadRequest
from loadtest.placement.experiment import IDEAL_CHOICE, conditions, run_grid
from loadtest.placement.report import print_tables, write_report
from loadtest.placement.tuning import pick, settings, table
from loadtest.report_folder import reporting, write_whole
from router.policies import POLICIES

SUMMARY = "the same tuning budget for every policy"
DESCRIPTION = """\
Gives every policy the same number of settings of its knobs, drawn around its defaults, and keeps the one
with the soonest mean time to first token: 16 replicas, loads 0.85 and 1.05, seeds that bench-placement
does not use. Prints what it gained, and writes the settings to a file for --policy @FILE.

examples
  python -m loadtest tune
  python -m loadtest tune --policy expected_time --policy preble --budget 16
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace(parser)
    add("--policy", action="append", metavar="NAME", help="may be repeated (default: all that have knobs)")
    add(
        "--budget",
        type=read.count,
        default=8,
        metavar="N",
        help="settings tried per policy, its defaults included (default: 8)",
    )
    add("--seed", type=read.whole, default=0, metavar="S", help="of the settings drawn (default: 0)")
    add_requests(parser)
    add_cache(parser)
    add_output(parser, "tune", "report.md, results.json and tuned_policies.txt")
    add_results(parser)


def run(options: argparse.Namespace, console: Console) -> None:
    output = output_with_results_of(options)
    names = options.policy or [name for name, spec in POLICIES.items() if spec.option_names]
    tried = {name: settings(name, options.budget, options.seed) for name in map(_known, names)}
    everything = tuple(choice for choices in tried.values() for choice in choices)
    trace = replace(trace_of(options), num_requests=options.requests)
    spec = tuning_spec(trace, (IDEAL_CHOICE, *everything), options.cache_tokens)
    began_s = time.monotonic()
    comparison = run_grid(spec, output, console)
    found = [pick(comparison, IDEAL_CHOICE, choices) for choices in tried.values()]
    tables = [table(found)]
    print_tables(tables, console)
    path = output.report / "tuned_policies.txt"
    with reporting(output.report):
        write_report(output.report, tables, comparison, conditions(spec, time.monotonic() - began_s))
        write_whole(path, "".join(f"{tuned.best.label}\n" for tuned in found).encode())
    console.print(f"For --policy @FILE: {path}", soft_wrap=True)


def _known(name: str) -> str:
    """Raises BadRequest for what is no policy's name; knobs are what is looked for here."""
    if name not in POLICIES:
        raise BadRequest(f"unknown policy {name!r}; there are: {', '.join(POLICIES)}")
    return name
