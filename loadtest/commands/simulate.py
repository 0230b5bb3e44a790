"""`python -m loadtest simulate`: policies beside each other on one workload."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rich.console import Console

from loadtest.commands.options import (
    add_machine,
    add_output,
    add_requests,
    add_results,
    add_trace,
    output_with_results_of,
    trace_of,
)
from loadtest.placement import arguments as read
from loadtest.placement.errors import BadRequest, PlacementError
from loadtest.placement.experiment import run_experiment
from loadtest.placement.policy_choice import DEFAULT, parse_policies
from loadtest.placement.suites import GridSpec
from loadtest.workloads.generators import GENERATORS
from loadtest.workloads.reference import WorkloadRef

SUMMARY = "compare placement policies"
DESCRIPTION = """\
Compares placement policies on one workload: every policy meets the same windows of requests, one per seed, at
each number of replicas and each load. Prints, per policy: mean and p99 time to first token over the
ideal's, hit rate, imbalance, by prompt length; and the default policy beside each rival, with
95 % intervals over the paired seeds. Finished cells are kept, so the same command goes on where it stopped.

words
  load 1.0     the rate at which the work left after the hits of one cache, N times as large, fills N replicas
  ideal        greedy least time to first token over N engines that share that cache at no cost
  ideal_apart  the same over engines with a cache each, known from inside as well
  ..._shortest either of them in late binding's order
  window       so many requests; higher loads lay more sessions over each other, and never squeeze time

examples
  python -m loadtest simulate --policy all
  python -m loadtest simulate --replicas 8 --load 0.7,0.9 --policy expected_time --policy power_of_two
  python -m loadtest simulate --policy expected_time+shortest --policy expected_time+late --seed 0-9
  python -m loadtest simulate --policy expected_time --policy expected_time:near_tie=0.2
  python -m loadtest simulate --workload agent_loops:steps=20 --policy all
  python -m loadtest simulate --policy ideal_apart --policy expected_time
  python -m loadtest simulate --routers 1,2,4 --event-delay 0.05 --policy expected_time
  python -m loadtest simulate --replicas 4 --fail 60:0:20 --scale 120:6 --policy expected_time
  python -m loadtest simulate --validate
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trace(parser)
    add(
        "--workload",
        type=read.generator,
        action="append",
        metavar="NAME[:KNOB=VALUE,...]",
        help=f"a generator instead of a trace; may be repeated: {', '.join(GENERATORS)}",
    )
    add(
        "--policy",
        action="append",
        metavar="NAME[:KNOB=VALUE,...]",
        help="may be repeated; NAME+late binds late, NAME+shortest has engines compute short prompts first, "
        "as they ship; 'all' is every policy at its defaults, and the ideals; "
        f"an unknown name lists them (default: {DEFAULT})",
    )
    add(
        "--replicas",
        type=read.different(read.count),
        default=(4, 16),
        metavar="N,...",
        help="numbers of replicas (default: 4,16)",
    )
    add(
        "--load",
        type=read.different(read.load),
        default=(0.6, 0.85, 1.05),
        metavar="L,...",
        help="loads (default: 0.6,0.85,1.05)",
    )
    add(
        "--seed",
        type=read.seeds,
        default=(0, 1, 2),
        metavar="S,...|A-B",
        help="one window per seed, the same for all policies (default: 0-2)",
    )
    add_requests(parser)
    add(
        "--cache-tokens",
        type=read.different(read.tokens),
        default=(1_500_000,),
        metavar="T,...",
        help="cache of one replica, such as 400k,1.5M,6M (default: 1.5M)",
    )
    add(
        "--routers",
        type=read.different(read.count),
        default=(1,),
        metavar="N,...",
        help="router processes that know of each other through the engines alone; several are compared with "
        "one, which runs as well if it is not named (default: 1)",
    )
    add(
        "--event-delay",
        type=read.seconds,
        default=0.005,
        metavar="SECONDS",
        help="from an engine's publication to the routers (default: 0.005)",
    )
    add(
        "--no-kv-events",
        action="store_true",
        help="engines tell their load alone, and the routers imitate their caches",
    )
    add(
        "--slow",
        type=read.list_of(read.load),
        default=(),
        metavar="FACTOR,...",
        help="how much longer each step takes on the first replicas (default: 1 for all)",
    )
    add(
        "--fail",
        type=read.failure,
        action="append",
        default=[],
        metavar="SECOND:REPLICA[:DOWN]",
        help="a replica dies, counted from 0; with DOWN an empty one comes so many seconds later "
        "(the ideal's fleet neither fails nor changes)",
    )
    add(
        "--scale",
        type=read.scaling,
        action="append",
        default=[],
        metavar="SECOND:REPLICAS",
        help="the fleet grows (empty replicas) or shrinks (the newest drain)",
    )
    add(
        "--validate",
        action="store_true",
        help="instead: replay 300 requests on four real replicas and in the simulator, and compare; takes no "
        "other option",
    )
    add_machine(parser)
    add_output(parser, "simulate", "report.md, results.json and plots")
    add_results(parser)


def run(options: argparse.Namespace, console: Console) -> None:
    if options.validate:
        _validate(options, console)
        return
    output = output_with_results_of(options)
    spec = GridSpec(
        workloads=_workloads(options),
        policies=tuple(parse_policies(options.policy or [DEFAULT])),
        replicas=options.replicas,
        loads=options.load,
        seeds=options.seed,
        cache_tokens=options.cache_tokens,
        routers=options.routers if 1 in options.routers else (1, *options.routers),
        event_delay_s=options.event_delay,
        has_kv_events=not options.no_kv_events,
        slowdowns=options.slow,
        failures=tuple(options.fail),
        scalings=tuple(options.scale),
        machine=options.machine,
    )
    console.print(f"Machine: {spec.machine.describe()}", soft_wrap=True)
    run_experiment(spec, output, console)


def _validate(options: argparse.Namespace, console: Console) -> None:
    for name, default in _defaults().items():
        if getattr(options, name) != default and name != "validate":
            raise BadRequest(f"--validate takes no other option, and not --{name.replace('_', '-')}")
    from loadtest.simulation.validate import validate  # starts real replicas: heavy, and asked for by name

    if not validate(console):
        raise PlacementError("the simulator is not within its tolerance of the real replicas")


def _defaults() -> dict[str, object]:
    """Of every option, by its name in a namespace."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return vars(parser.parse_args([]))


def _workloads(options: argparse.Namespace) -> tuple[WorkloadRef, ...]:
    """The generators asked for; else the trace asked for, or the default one."""
    if options.workload and (options.trace is not None or options.spread_ticks):
        raise BadRequest("--workload is instead of a trace: it goes with neither --trace nor --spread-ticks")
    chosen = options.workload or [trace_of(options)]
    return tuple(replace(workload, num_requests=options.requests) for workload in chosen)
