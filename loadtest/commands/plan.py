"""`python -m loadtest plan`: the fewest replicas that keep a promise on a trace."""

from __future__ import annotations

import argparse

from rich.console import Console

from loadtest.commands.options import add_machine, add_output, add_trace, output_of, trace_of
from loadtest.placement import arguments as read
from loadtest.placement.errors import BadRequest
from loadtest.placement.plan import PlanRequest
from loadtest.placement.plan_report import run_plan
from loadtest.placement.policy_choice import SHIPPED, parse_policy
from router.policies import POLICIES

SUMMARY = "how many replicas a trace needs"
DESCRIPTION = """\
Reads a trace (a recording of this service, `record:` in deploy.yaml, or one in Mooncake's format), replays
its busiest stretch, the one with the most work per second, against simulated fleets, and prints the fewest
replicas that keep the time to first token, for each cache size, and the hit rate that any cache size could
reach. What it finds is tried on the whole trace, if that is at most ten times as long.

example
  python -m loadtest plan --trace mine.jsonl --ttft-p99 0.5 --cache-tokens 400k,1.5M
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace(parser)
    add(
        "--ttft-p99",
        type=read.positive_seconds,
        required=True,
        metavar="SECONDS",
        help="the time to first token that 99 %% of requests must not exceed",
    )
    add(
        "--cache-tokens",
        type=read.different(read.tokens),
        metavar="T,...",
        default=(400_000, 1_500_000, 6_000_000),
        help="cache sizes of one replica to choose from (default: 400k,1.5M,6M)",
    )
    add(
        "--requests",
        type=read.several,
        default=4_000,
        metavar="N",
        help="length of the busiest stretch that is replayed (default: 4000)",
    )
    add("--max-replicas", type=read.count, default=256, metavar="N", help="give up beyond (default: 256)")
    add(
        "--policy",
        default=SHIPPED.label,
        metavar="NAME[:KNOB=VALUE,...]",
        help=f"as in `simulate`, but no ideal: none can be deployed (default: as it ships, {SHIPPED.label})",
    )
    add_machine(parser)
    add_output(parser, "plan", "plan.json and hit-rate.png")


def run(options: argparse.Namespace, console: Console) -> None:
    policy = parse_policy(options.policy)
    if policy.is_ideal:
        raise BadRequest(
            f"--policy: {options.policy!r} knows engines from inside, so it cannot be deployed; there are: "
            f"{', '.join(POLICIES)}"
        )
    output = output_of(options)
    request = PlanRequest(
        trace=trace_of(options),
        ttft_p99_s=options.ttft_p99,
        cache_tokens=options.cache_tokens,
        num_requests=options.requests,
        max_replicas=options.max_replicas,
        policy=policy,
        machine=options.machine,
    )
    run_plan(request, output, console)
