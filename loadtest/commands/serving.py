"""Options of the commands that ask real servers, and what they mean. Knows argparse; runs nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from loadtest.commands.options import trace_of
from loadtest.comparison.conditions import conditions
from loadtest.comparison.contender import (
    RAY_ROUTER,
    Changes,
    Contender,
    of_policies,
    of_routers,
    read_contender,
)
from loadtest.comparison.deployment import START_LIMIT_S, Deployment, check, check_environment
from loadtest.comparison.experiment import Experiment, Start, check_windows
from loadtest.comparison.plan import Cell, Plan, Search
from loadtest.comparison.progress import ComparisonProgress, expected_s, in_words
from loadtest.comparison.report import check_plots, report
from loadtest.comparison.results import Results
from loadtest.open_loop.tally import Targets
from loadtest.placement import arguments as read
from loadtest.placement.errors import BadRequest, NotWritten, Stopped
from loadtest.report_folder import check_folder
from loadtest.workloads.generators import GENERATORS
from loadtest.workloads.reference import WorkloadRef

REPORTS = Path(".bench")
DEFAULT_REPEATS = 3


class StoppedEarly(Stopped):
    """Ctrl-C, after the report of what ran, if anything has."""

    def __init__(self, results: Results) -> None:
        told = "the report has what ran until then" if results.runs else "nothing had been answered yet"
        Exception.__init__(self, f"stopped: {told}")


def add_contenders(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="deploy.yaml", help="deployments to compare")
    add(
        "--policy",
        metavar="NAME[:KNOB=VALUE],...",
        help="instead: one file with each of these policies; names as in `simulate`, and "
        f"{RAY_ROUTER}, Ray Serve's own PrefixCacheAffinityRouter",
    )
    add(
        "--routers",
        type=read.different(read.count),
        metavar="N,...",
        help="instead: one file with so many Routers, each in a process of its own",
    )
    add("--replicas", type=read.count, metavar="N", help="of every contender (default: as its file says)")
    add(
        "--simulated",
        action="store_true",
        help="replicas whose steps take time and compute nothing: 16 and more on a laptop",
    )
    add_start_limit(parser)


def add_start_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-limit",
        type=read.positive_seconds,
        default=START_LIMIT_S,
        metavar="SECONDS",
        help="for each server to be ready, weights read and all (default: %(default)g)",
    )


def contenders_of(options: argparse.Namespace) -> tuple[Contender, ...]:
    """Raises BadRequest, BadDeployment."""
    changes = Changes(num_replicas=options.replicas, simulated=options.simulated)
    if options.policy is not None and options.routers is not None:
        raise BadRequest("--policy and --routers are instead of each other")
    if options.policy is not None:
        found = of_policies(_single_file(options, "--policy"), policy_names(options.policy), changes)
    elif options.routers is not None:
        found = of_routers(_single_file(options, "--routers"), options.routers, changes)
    else:
        found = [read_contender(path, changes) for path in options.files]
    if not found:
        raise BadRequest("name deploy.yaml files to compare, or --policy A,B,C, or --routers 2,1")
    return different(found)


def _single_file(options: argparse.Namespace, changed_by: str) -> Path:
    """Raises BadRequest."""
    if len(options.files) > 1:
        raise BadRequest(f"{changed_by} changes one file: name none (deploy.yaml) or one")
    return options.files[0] if options.files else Path("deploy.yaml")


def different(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """Raises BadRequest where one is there twice: reports know them by their labels."""
    labels = [contender.label for contender in contenders]
    if len(set(labels)) < len(labels):
        raise BadRequest(f"a contender is named twice: {', '.join(labels)}")
    return tuple(contenders)


def policy_names(text: str) -> list[str]:
    """`a,b:x=1,y=2,c`: a part with `=` and without `:` belongs to the policy before it."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workload",
        type=read.generator,
        metavar="NAME[:KNOB=VALUE,...]",
        help=f"what is asked: {', '.join(GENERATORS)} (default: multi_turn)",
    )
    add("--trace", type=read.trace, metavar="FILE", help="instead: a recording, or Mooncake's format")
    add("--spread-ticks", action="store_true", help="spread a trace's arrivals of one instant over its tick")
    add("--seconds", type=read.positive_seconds, default=60.0, metavar="S", help="of arrivals (default: 60)")
    add(
        "--max-context",
        type=read.tokens,
        metavar="TOKENS",
        help="cut prompts so that they fit with their answers",
    )
    add("--text", action="store_true", help="prompts as text instead of token ids")


def workload_of(options: argparse.Namespace) -> WorkloadRef:
    """Raises BadRequest."""
    if options.trace is not None and options.workload is not None:
        raise BadRequest("--workload is instead of --trace")
    if options.trace is not None:
        return trace_of(options)
    return options.workload or WorkloadRef("multi_turn")


def add_repeats(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--repeats",
        type=read.count,
        default=DEFAULT_REPEATS,
        metavar="N",
        help="of everything, on servers started anew, contenders in turn "
        f"(default: {DEFAULT_REPEATS}; 1 has no intervals)",
    )
    add("--seed", type=read.whole, default=0, metavar="N", help="of the first repeat (default: 0)")


def add_targets(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--ttft",
        type=read.positive_seconds,
        required=required,
        metavar="SECONDS",
        help="target: an answer is good if its first token comes within this",
    )
    parser.add_argument(
        "--itl",
        type=read.positive_seconds,
        metavar="SECONDS",
        help="target: ... and no two pieces of it are further apart",
    )


def targets_of(options: argparse.Namespace) -> Targets:
    return Targets(options.ttft, options.itl)


def add_report(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=REPORTS / name,
        metavar="FOLDER",
        help="results.json, report.md and report.html (default: %(default)s)",
    )
    parser.add_argument("--no-plots", action="store_true", help="no report.html; plots need matplotlib")


def plan_of(
    options: argparse.Namespace, *, cells: tuple[Cell, ...] = (), searches: tuple[Search, ...] = ()
) -> Plan:
    """These, by every contender. Raises BadRequest, BadDeployment."""
    return Plan(
        contenders=contenders_of(options),
        cells=cells,
        searches=searches,
        repeats=options.repeats,
        seed=options.seed,
        targets=targets_of(options),
        max_context=options.max_context,
        uses_text=options.text,
    )


def carry_out(plan: Plan, options: argparse.Namespace, console: Console, command: list[str]) -> None:
    """Check everything, run, report. Raises what the plan's parts raise, after the report of what ran."""
    check_plots(with_plots=not options.no_plots)
    check_folder(options.out)
    check_windows(plan)
    check_environment()
    for contender in plan.contenders:
        check(contender)
    console.print(f"About {in_words(expected_s(plan))}; Ctrl-C reports what ran until then.")
    with ComparisonProgress(console, plan) as progress:
        experiment = Experiment(plan, _started(options.start_limit, console), progress, conditions(command))
        try:
            results = experiment.run()
        except Exception as error:
            progress.__exit__(None, None, None)
            if experiment.results.runs:
                try:
                    report(experiment.results, options.out, console, with_plots=not options.no_plots)
                except NotWritten as unwritten:
                    error.add_note(str(unwritten))
            raise
    report(results, options.out, console, with_plots=not options.no_plots)
    if results.was_stopped:
        raise StoppedEarly(results)
    results.require_whole_answers()


def _started(limit_s: float, console: Console) -> Start:
    @contextmanager
    def start(contender: Contender) -> Iterator[str]:
        def tell() -> None:
            told = f"{contender.label}: other work left Ray too little time to start; it is started again"
            console.print(told, style="yellow", soft_wrap=True, markup=False)

        with Deployment(contender, limit_s, on_busy=tell) as deployment:
            yield deployment.url

    return start
