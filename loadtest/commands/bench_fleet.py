"""`python -m loadtest bench-fleet`: the project's own comparison of policies on real engines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from loadtest.commands.serving import (
    DEFAULT_REPEATS,
    add_repeats,
    add_report,
    add_start_limit,
    carry_out,
    different,
    policy_names,
)
from loadtest.comparison.contender import RAY_ROUTER, Changes, of_policies
from loadtest.comparison.plan import Cell, Plan, Search
from loadtest.open_loop.tally import Targets
from loadtest.placement import arguments as read
from loadtest.workloads.reference import WorkloadRef

SUMMARY = "the project's own comparison on real engines"
DESCRIPTION = """\
Four replicas of the built-in model on this machine's CPU, behind each policy in turn: what ships, round
robin, power of two, session affinity and Ray Serve's own prefix-affinity router. Measures chats behind shared
system prompts at one rate, with caches too small for all of them; adverse traffic, where nothing or all is
shared or answers are long; and the highest rate of chats that keeps the p99 time to first token.
docs/benchmarking.md says how to read it. --quick is one repeat of a part of it. Status 1, after the report,
if an answer at a rate that is not searched for was not whole; requests refused as busy are no error.

examples
  python -m loadtest bench-fleet --quick
  python -m loadtest bench-fleet --part chats --policy expected_time,ray_prefix_router --repeats 5
  python -m loadtest bench-fleet --part search --rate 6
"""

CONTENDERS = ("expected_time", "round_robin", "power_of_two", "session_affinity", RAY_ROUTER)
NUM_REPLICAS = 4
TARGETS = Targets(ttft_s=2.0)
MAX_CONTEXT = 8192

# The same for everybody. Nobody is refused for waiting: a rival's long waits are to be seen, not turned away.
# 20,480 tokens each: the chats of a minute fit into four such caches, and by far not into one.
REPLICA = {"model": "tiny", "device": "cpu", "num_blocks": 1280, "max_wait_s": None}
ROUTER = {"max_wait_s": None}


def chats(think_s: float) -> WorkloadRef:
    """Chats of twelve turns on average behind 64 system prompts. think_s: median pause between two turns."""
    return WorkloadRef(
        "multi_turn",
        (
            ("answer_tokens", 8),
            ("first_tokens", 300),
            ("message_tokens", 60),
            ("num_prompts", 64),
            ("prompt_tokens", 100),
            ("think_s", think_s),
            ("turns", 12),
        ),
    )


CHATS = chats(12.0)
# More at a time: what a cache holds is gone before its chat goes on, unless few others are sent there.
SLOW_CHATS = chats(18.0)
ADVERSE = (
    (WorkloadRef("no_reuse", (("answer_tokens", 8), ("prompt_tokens", 400))), 3.0),
    (
        WorkloadRef("hot_prefix", (("answer_tokens", 8), ("prefix_tokens", 1500), ("question_tokens", 60))),
        4.0,
    ),
    (WorkloadRef("decode_heavy", (("answer_tokens", 60), ("message_tokens", 40), ("think_s", 5))), 2.0),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="chats at one rate, half the time, one repeat: 10 minutes")
    add("--rate", type=read.load, default=4.0, metavar="R", help="of chats, requests/s (default: 4)")
    add(
        "--seconds",
        type=read.positive_seconds,
        default=90.0,
        metavar="S",
        help="of each run of chats (default: 90)",
    )
    add(
        "--part",
        action="append",
        choices=("chats", "adverse", "search"),
        help="only these; may be repeated (default: all)",
    )
    add(
        "--policy",
        type=policy_names,
        default=CONTENDERS,
        metavar="A,B,..",
        help=f"only these, the first beside each other one (default: {','.join(CONTENDERS)})",
    )
    add_start_limit(parser)
    add_repeats(parser)
    parser.set_defaults(repeats=None)  # as many as its parts ask for
    add_report(parser, "fleet")


def run(options: argparse.Namespace, console: Console) -> None:
    carry_out(fleet_plan(options), options, console, sys.argv[1:])


def fleet_plan(options: argparse.Namespace) -> Plan:
    """Raises BadRequest, BadDeployment."""
    parts = options.part or (["chats"] if options.quick else ["chats", "adverse", "search"])
    seconds = options.seconds / 2 if options.quick else options.seconds
    cells: list[Cell] = []
    if "chats" in parts:
        cells += [Cell(workload, options.rate, seconds) for workload in (CHATS, SLOW_CHATS)]
    if "adverse" in parts:
        cells += [Cell(workload, rate, seconds / 2) for workload, rate in ADVERSE]
    searches = (Search(CHATS, options.rate, seconds),) if "search" in parts else ()
    changes = Changes(num_replicas=NUM_REPLICAS, replica=REPLICA, router=ROUTER)
    return Plan(
        contenders=different(of_policies(Path("deploy.yaml"), options.policy, changes)),
        cells=tuple(cells),
        searches=searches,
        repeats=options.repeats or (1 if options.quick else DEFAULT_REPEATS),
        seed=options.seed,
        targets=TARGETS,
        max_context=MAX_CONTEXT,
    )
