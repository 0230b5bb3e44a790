"""`python -m loadtest bench-routers`: several routers beside one, on real replicas."""

from __future__ import annotations

import argparse

from rich.console import Console

from loadtest.placement import arguments as read
from loadtest.placement.errors import BadRequest, PlacementError
from router.config import BINDINGS

SUMMARY = "several routers beside one, on real replicas"
DESCRIPTION = """\
Serves the same requests on four real replicas of the built-in model, each a process with production's engine
and event sockets, behind one production router and behind several that hear of each other from the engines
alone; in rounds, each a workload of its own. Prints mean time to first token over one router's, with its 95 %
interval over the rounds. Steps are stretched so that replicas do not wait for each other's cores: some
minutes a round on two cores, and the quieter the machine, the better.

examples
  python -m loadtest bench-routers
  python -m loadtest bench-routers --routers 2,4 --rounds 10 --binding at_once
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--routers",
        type=read.different(read.count),
        default=(2,),
        metavar="N,...",
        help="numbers of routers beside one (default: 2)",
    )
    add(
        "--rounds", type=read.count, default=5, metavar="N", help="workloads, each served by all (default: 5)"
    )
    add("--binding", choices=BINDINGS, default="late", help="of the policy (default: late)")


def run(options: argparse.Namespace, console: Console) -> None:
    from loadtest.simulation.several_routers import compare_routers  # starts real replicas: heavy

    if 2 not in options.routers or 1 in options.routers:
        raise BadRequest("--routers are beside one: 2 among them, and 1 not")
    if not compare_routers(console, options.routers, options.rounds, options.binding):
        raise PlacementError("two routers are not within their limit of one")
