"""`python -m loadtest sweep`: the highest rate at which each policy keeps a latency target."""

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
from loadtest.comparison.plan import Search
from loadtest.placement import arguments as read

SUMMARY = "find the highest rate that keeps a latency target, per policy"
DESCRIPTION = """\
For each contender: sends the workload by the clock at a rate, and raises the rate while 99 % of the requests
keep the targets, lowers it when they do not, until the highest good rate is known to the precision asked for.
A try that is lost already is given up, and sent once more before its rate is believed to be too high. The
first half of each only warms the caches, as whoever meets its sessions for the first time has none of their
histories; it lasts until enough requests count for one in a hundred of them to be a number. Every repeat
starts servers anew, with another seed. Answers that fail make a rate too high, and are no error while some
come.

examples
  python -m loadtest sweep --policy expected_time,round_robin --replicas 4 --ttft 1 --rate 4
  python -m loadtest sweep a.yaml b.yaml --workload system_prompts --ttft 0.5 --itl 0.2
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_contenders(parser)
    add_workload(parser)
    add_targets(parser, required=True)
    parser.add_argument(
        "--rate", type=read.load, default=4.0, metavar="R", help="to begin with, per second (default: 4)"
    )
    parser.add_argument(
        "--precision", type=read.load, default=0.08, metavar="SHARE", help="of the rate (default: 0.08)"
    )
    parser.add_argument(
        "--warm",
        type=read.share,
        default=0.5,
        metavar="SHARE",
        help="of each try's requests only warm the caches and are not counted (default: 0.5)",
    )
    parser.add_argument(
        "--counted",
        type=read.count,
        default=200,
        metavar="N",
        help="requests of each try count, at least, however long that takes (default: 200)",
    )
    add_repeats(parser)
    add_report(parser, "sweep")


def run(options: argparse.Namespace, console: Console) -> None:
    search = Search(
        workload_of(options),
        options.rate,
        options.seconds,
        options.precision,
        options.warm,
        options.counted,
    )
    carry_out(plan_of(options, searches=(search,)), options, console, sys.argv[1:])
