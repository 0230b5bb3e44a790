"""`python -m loadtest compare`: deployments beside each other, on the same workload, on this machine."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from loadtest.commands.serving import (
    add_contenders,
    add_repeats,
    add_report,
    add_targets,
    add_workload,
    carry_out,
    plan_of,
    workload_of,
)
from loadtest.comparison.plan import Cell
from loadtest.placement import arguments as read

SUMMARY = "start deployments in turn and measure them on one workload"
DESCRIPTION = """\
Starts each deployment on a Ray cluster of its own, warms it, sends it the same workload by the clock (an open
loop: requests leave when they are due, whatever has become of earlier ones), and stops it; then the next one;
and all of them again, somebody else first, with another seed. Prints a table with 95 % intervals over the
repeats and writes results.json, report.md and report.html. The first contender is held against the others.
Status 1, after the report, if an answer was not whole; requests refused as busy are counted, and no error.

examples
  python -m loadtest compare --policy expected_time,round_robin --replicas 4 --rate 4
  python -m loadtest compare a.yaml b.yaml --workload agent_loops:tools_tokens=800 --rate 2,4,8 --ttft 0.5
  python -m loadtest compare --simulated --replicas 16 --policy expected_time,power_of_two --rate 60
  python -m loadtest compare --simulated --replicas 4 --routers 2,1 --rate 20
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_contenders(parser)
    add_workload(parser)
    parser.add_argument(
        "--rate",
        type=read.different(read.load),
        default=(4.0,),
        metavar="R,...",
        help="requests per second (default: 4)",
    )
    add_targets(parser)
    add_repeats(parser)
    add_report(parser, "compare")


def run(options: argparse.Namespace, console: Console) -> None:
    workload = workload_of(options)
    cells = tuple(Cell(workload, rate, options.seconds) for rate in options.rate)
    carry_out(plan_of(options, cells=cells), options, console, sys.argv[1:])
