"""`python -m loadtest`: placement policies in a simulated cluster, and how many replicas a trace needs.

Reads the command line and prints; everything else is in `loadtest.placement`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.placement import arguments as read
from loadtest.placement.bench import PARTS, Bench, bench_specs, tuning_spec
from loadtest.placement.errors import BadRequest, PlacementError, Stopped
from loadtest.placement.experiment import IDEAL_CHOICE, RESULTS, Output, conditions, run_experiment, run_grid
from loadtest.placement.plan import PlanRequest
from loadtest.placement.plan_report import run_plan
from loadtest.placement.policy_choice import DEFAULT, parse_policies
from loadtest.placement.report import print_tables, write_report
from loadtest.placement.suites import TRACE_VARIABLE, GridSpec, default_trace
from loadtest.placement.tuning import pick, settings, table
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.generators import GENERATORS
from loadtest.workloads.reference import DEFAULT_REQUESTS, WorkloadRef
from router.policies import POLICIES

STOPPED = 130  # as a shell reports Ctrl-C
BAD_REQUEST = 2  # as argparse reports it

FILE_WIDTH = 160  # columns when the tables go to a file or a pipe: nothing needs to be cut

DESCRIPTION = """\
Simulates a cluster of replicas under a virtual clock, with the router, scheduler and cache that run in
production and a model's step time instead of a model. See docs/design/008-simulator.md.
"""

SIMULATE = """\
Compares placement policies on one workload: every policy meets the same windows of requests, one per seed, at
each number of replicas and each load. Prints, per policy: mean and p99 time to first token over the
ideal's, hit rate, imbalance, by prompt length; and the default policy beside each rival, with
95 % intervals over the paired seeds. Finished cells are kept, so the same command goes on where it stopped.

words
  load 1.0   the rate at which the work left after the hits of one cache, N times as large, fills N replicas
  ideal      greedy least time to first token over N engines that share that cache at no cost
  window     so many requests; higher loads lay more sessions over each other, and never squeeze time

examples
  python -m loadtest simulate --policy all
  python -m loadtest simulate --replicas 8 --load 0.7,0.9 --policy expected_time --policy power_of_two
  python -m loadtest simulate --policy expected_time --policy expected_time+late --seed 0-9
  python -m loadtest simulate --policy expected_time --policy expected_time:near_tie=0.2
  python -m loadtest simulate --workload agent_loops:steps=20 --policy all
  python -m loadtest simulate --routers 1,2,4 --event-delay 0.05 --policy expected_time
  python -m loadtest simulate --replicas 4 --fail 60:0:20 --scale 120:6 --policy expected_time
  python -m loadtest simulate --validate
"""

PLAN = """\
Reads a trace (a recording of this service, `record:` in deploy.yaml, or one in Mooncake's format), replays
its busiest stretch against simulated fleets, and prints the fewest replicas that keep the time to first
token, for each cache size, and the hit rate that any cache size could reach.

example
  python -m loadtest plan --trace mine.jsonl --ttft-p99 0.5 --cache-tokens 400k,1.5M
"""

TUNE = """\
Gives every policy the same number of settings of its knobs, drawn around its defaults, and keeps the one
with the soonest mean time to first token: 16 replicas, loads 0.85 and 1.05, seeds that bench-placement
does not use. Prints what it gained, and writes the settings to a file for --policy @FILE.
"""

BENCH = """\
The project's own comparison, in parts. Without arguments a part of it that takes about ten minutes on two
cores; --full is all of it, which may be stopped and taken up again. docs/benchmarks.md has what it gave.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    try:
        options.run(options, console)
    except Stopped as error:
        errors.print(str(error), soft_wrap=True, markup=False)
        return STOPPED
    except (BadRequest, WorkloadError) as error:
        errors.print(f"loadtest: {error}", soft_wrap=True, markup=False)
        return BAD_REQUEST
    except PlacementError as error:
        errors.print(f"loadtest: {error}", soft_wrap=True, markup=False)
        return 1
    except KeyboardInterrupt:
        errors.print("stopped")
        return STOPPED
    return 0


def _simulate(options: argparse.Namespace, console: Console) -> None:
    if options.validate:
        _validate(console)
        return
    spec = GridSpec(
        workloads=_workloads(options),
        policies=tuple(parse_policies(options.policy or [DEFAULT])),
        replicas=options.replicas,
        loads=options.load,
        seeds=options.seed,
        cache_tokens=options.cache_tokens,
        routers=options.routers,
        event_delay_s=options.event_delay,
        slowdowns=options.slow,
        failures=tuple(options.fail),
        scalings=tuple(options.scale),
        machine=options.machine,
    )
    console.print(f"Machine: {spec.machine.describe()}", soft_wrap=True)
    run_experiment(spec, _output(options), console)


def _validate(console: Console) -> None:
    from loadtest.simulation.validate import validate  # starts real replicas: heavy, and asked for by name

    if not validate(console):
        raise PlacementError("the simulator is not within its tolerance of the real replicas")


def _bench(options: argparse.Namespace, console: Console) -> None:
    for part in bench_specs(Bench(options.full, options.part, options.cache_tokens), _trace_of(options)):
        console.print(f"[bold]{part.name}[/]: {part.purpose}", soft_wrap=True)
        output = replace(_output(options), report=_output(options).report / part.name)
        run_experiment(part.spec, output, console, targets=part.targets)


def _tune(options: argparse.Namespace, console: Console) -> None:
    names = options.policy or [name for name, spec in POLICIES.items() if spec.option_names]
    tried = {name: settings(name, options.budget, options.seed) for name in map(_known, names)}
    everything = tuple(choice for choices in tried.values() for choice in choices)
    trace = replace(_trace_of(options), num_requests=options.requests)
    spec = tuning_spec(trace, (IDEAL_CHOICE, *everything), options.cache_tokens)
    output = _output(options)
    began_s = time.monotonic()
    comparison = run_grid(spec, output, console)
    found = [pick(comparison, IDEAL_CHOICE, choices) for choices in tried.values()]
    tables = [table(found)]
    print_tables(tables, console)
    write_report(output.report, tables, comparison, conditions(spec, time.monotonic() - began_s))
    path = output.report / "tuned_policies.txt"
    path.write_text("".join(f"{tuned.best.label}\n" for tuned in found))
    console.print(f"For --policy @FILE: {path}", soft_wrap=True)


def _known(name: str) -> str:
    return parse_policies([name])[-1].name


def _plan(options: argparse.Namespace, console: Console) -> None:
    request = PlanRequest(
        trace=Path(_trace_of(options).source),
        ttft_p99_s=options.ttft_p99,
        cache_tokens=options.cache_tokens,
        num_requests=options.requests,
        max_replicas=options.max_replicas,
        policy=parse_policies([options.policy])[-1],
        machine=options.machine,
    )
    run_plan(request, _output(options), console)


def _workloads(options: argparse.Namespace) -> tuple[WorkloadRef, ...]:
    """The generators asked for; else the trace asked for, or the default one."""
    chosen = options.workload or [_trace_of(options)]
    return tuple(replace(workload, num_requests=options.requests) for workload in chosen)


def _trace_of(options: argparse.Namespace) -> WorkloadRef:
    if options.trace is not None:
        return options.trace  # type: ignore[no-any-return]
    path = default_trace()
    if not path.is_file():
        raise BadRequest(f"{TRACE_VARIABLE} names {str(path)!r}, which is not a file")
    return WorkloadRef(str(path))


def _output(options: argparse.Namespace) -> Output:
    return Output(
        results=options.results,
        report=options.out,
        with_plots=not options.no_plots,
        num_workers=options.workers,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=DESCRIPTION, formatter_class=_Formatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_simulate(_command(commands, "simulate", "compare placement policies", SIMULATE, _simulate))
    _add_bench(_command(commands, "bench-placement", "the project's own comparison", BENCH, _bench))
    _add_tune(_command(commands, "tune", "the same tuning budget for every policy", TUNE, _tune))
    _add_plan(_command(commands, "plan", "how many replicas a trace needs", PLAN, _plan))
    return parser


def _command(commands: Any, name: str, summary: str, description: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, formatter_class=_Formatter
    )
    parser.set_defaults(run=run)
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written."""


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_trace(parser)
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
        help="may be repeated; NAME+late binds late; 'all' is every policy at its defaults, and the ideals; "
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
    add(
        "--requests",
        type=read.count,
        default=DEFAULT_REQUESTS,
        metavar="N",
        help=f"in a window, an eighth of them to warm the caches (default: {DEFAULT_REQUESTS})",
    )
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
        help="router processes that know of each other through the engines alone (default: 1)",
    )
    add(
        "--event-delay",
        type=read.seconds,
        default=0.005,
        metavar="SECONDS",
        help="from an engine's publication to the routers (default: 0.005)",
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
        help="instead: replay 300 requests on four real replicas and in the simulator, and compare",
    )
    _add_machine(parser)
    _add_output(parser, "simulate")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_trace(parser)
    add("--full", action="store_true", help="all replicas, loads and seeds of each part")
    add(
        "--part",
        action="append",
        choices=PARTS,
        help="only these parts; may be repeated (default: see above)",
    )
    add(
        "--cache-tokens",
        type=read.tokens,
        default=1_500_000,
        metavar="T",
        help="cache of one replica (default: 1.5M; also to run: 400k, 6M)",
    )
    _add_output(parser, "bench")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_trace(parser)
    add("--policy", action="append", metavar="NAME", help="may be repeated (default: all that have knobs)")
    add(
        "--budget",
        type=read.count,
        default=8,
        metavar="N",
        help="settings tried per policy, its defaults included (default: 8)",
    )
    add("--seed", type=read.whole, default=0, metavar="S", help="of the settings drawn (default: 0)")
    add(
        "--requests",
        type=read.count,
        default=DEFAULT_REQUESTS,
        metavar="N",
        help=f"in a window (default: {DEFAULT_REQUESTS})",
    )
    add(
        "--cache-tokens",
        type=read.tokens,
        default=1_500_000,
        metavar="T",
        help="of one replica (default: 1.5M)",
    )
    _add_output(parser, "tune")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_trace(parser)
    add(
        "--ttft-p99",
        type=read.positive_seconds,
        required=True,
        metavar="SECONDS",
        help="the time to first token that 99 % of requests must not exceed",
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
        type=read.count,
        default=4_000,
        metavar="N",
        help="length of the busiest stretch that is replayed (default: 4000)",
    )
    add("--max-replicas", type=read.count, default=256, metavar="N", help="give up beyond (default: 256)")
    add("--policy", default=DEFAULT, metavar="NAME[:KNOB=VALUE,...]", help=f"(default: {DEFAULT})")
    _add_machine(parser)
    _add_output(parser, "plan")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=read.trace,
        metavar="FILE",
        help="JSON lines, .gz or not: a recording of this service, or Mooncake's format (default: what "
        f"{TRACE_VARIABLE} names, else the excerpt that comes with the project)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        type=read.machine,
        default=H100_8B,
        metavar="NAME=VALUE,...",
        help=f"constants of the simulated machine; without: {H100_8B.describe()}",
    )


def _add_output(parser: argparse.ArgumentParser, name: str) -> None:
    add = parser.add_argument
    defaults = Output()
    add(
        "--out",
        type=Path,
        default=defaults.report.parent / name,
        metavar="FOLDER",
        help="report.md, results.json and plots (default: %(default)s)",
    )
    add(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where finished cells are kept; delete it to start anew (default: %(default)s)",
    )
    add("--no-plots", action="store_true", help="tables only; plots need matplotlib")
    add(
        "--workers",
        type=read.count,
        default=defaults.num_workers,
        metavar="N",
        help="processes (default: one per core, here %(default)s)",
    )


if __name__ == "__main__":
    sys.exit(main())
