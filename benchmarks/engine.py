"""`make bench-engine`: our engine beside `model.generate` and transformers' continuous batching.

Wires arguments, worker processes, progress and the report together. Knows no measurement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks import cases, machine, report
from benchmarks.arguments import positive
from benchmarks.cases import ModelSpec, Plan
from benchmarks.contenders import NAMES
from benchmarks.measure import Bench, plan_work
from benchmarks.rows import Row
from benchmarks.worker import Worker, WorkerFailed
from replica.config import ReplicaConfig

FULL_REPEATS, QUICK_REPEATS = 4, 2
SHIPPED_CHUNK = ReplicaConfig().max_batched_tokens

DESCRIPTION = """\
Measure the engine on this machine's CPU beside two others that answer the same prompts with the same
weights: transformers' model.generate, and its own continuous batching (the engine of generate_batch).

Sections of the table, for each model:
  batch 1, 8, 32      prefill and steady decode in tokens/s, and peak memory above the loaded model
  first token         time to the first token with 0, 50 and 90 % of the prompt in the cache
  whole               requests from submission to the last token
  nothing shared      prefix caching on beside off, where it can only cost

How it is measured:
  Each contender is a process of its own with its own copy of the model; they take turns within every
  repeat. Numbers are medians: per second of CPU time first, in brackets per second of wall time; ratios
  (over 1: warmpath is faster) are medians of side-by-side ratios of CPU time. With one torch thread both
  clocks agree on an idle machine; on a busy one only CPU time is worth reading.
  "Steady decode" is the time of steps in which every sequence decodes, step by step. Loading, warming
  up and allocating pools are never timed. Greedy, float32; outputs are compared with generate's and a
  row whose outputs differ says so.
"""
EPILOG = """\
examples:
  make bench-engine                                            everything, about ten minutes
  make bench-engine ARGS="--quick"                             the 9M model with fewer repeats, one minute
  python -m benchmarks.engine --models 132M --json out.json    one model, and the numbers as a file
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    names = options.models or (["9M"] if options.quick else list(cases.MODELS))
    models = tuple(cases.MODELS[name] for name in names)
    make_plan = cases.quick_plan if options.quick else cases.full_plan
    plan = make_plan(models, options.repeats or (QUICK_REPEATS if options.quick else FULL_REPEATS))
    console = Console(highlight=False)
    began_s = time.monotonic()
    try:
        rows = measure(plan, threads=options.threads, chunk=options.chunk, console=console)
    except WorkerFailed as error:
        Console(stderr=True).print(f"[bold red]bench-engine:[/] {error}", soft_wrap=True)
        return 1
    where = machine.describe(options.threads)
    took_s = time.monotonic() - began_s
    conditions = {
        "machine": where,
        "took_s": round(took_s),
        "max_batched_tokens": options.chunk,
        "torch_threads": options.threads,
        "clock": "medians; `cpu_s` CPU seconds, `wall_s` wall seconds, in the section's unit",
    }
    print_report(rows, plan, conditions, Console(highlight=False, width=report.WIDTH))
    if options.json is not None:
        report.write_json(options.json, rows, conditions)
    return 0


def measure(plan: Plan, *, threads: int, chunk: int, console: Console) -> list[Row]:
    """Run the plan, showing progress. Raises WorkerFailed; leaves no process and no file behind."""
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="warmpath-bench-") as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("starting", total=sum(plan_work(spec, plan) for spec in plan.models))

        def advance(description: str, work: float) -> None:
            progress.update(task, advance=work, description=description or None)

        for spec in plan.models:
            with ExitStack() as stack:
                advance(f"{spec.name}: drawing weights, loading", 0.0)
                workers = _start(stack, spec, plan, Path(folder), threads, chunk)
                rows += Bench(spec, plan, workers, advance).rows()
    return rows


def _start(
    stack: ExitStack, spec: ModelSpec, plan: Plan, folder: Path, threads: int, chunk: int
) -> dict[str, Worker]:
    """One worker per contender. The first builds the model's folder, which the others read."""
    workers: dict[str, Worker] = {}
    for name in NAMES:
        workers[name] = Worker(name, spec, folder, threads=threads, num_blocks=plan.num_blocks, chunk=chunk)
        stack.callback(workers[name].close)
    first, *others = workers.values()
    for group in ([first], others):
        for worker in group:
            worker.load()
        for worker in group:
            worker.wait_until_ready()
    return workers


def print_report(rows: Sequence[Row], plan: Plan, conditions: dict[str, object], console: Console) -> None:
    console.print(report.table(rows, plan.models))
    console.print(conditions["machine"], soft_wrap=False)
    console.print(
        "CPU time (wall time); /gen and /cont: times as fast as each, by CPU time; "
        f"{conditions['max_batched_tokens']} tokens per step; {conditions['took_s']} s"
    )
    for line in report.summary(rows):
        console.print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="the 9M model only, fewer cases and repeats")
    parser.add_argument(
        "--models", nargs="+", choices=list(cases.MODELS), metavar="MODEL", help="9M, 132M (default: both)"
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        metavar="N",
        help=f"of the 9M model; the 132M has half (default: {FULL_REPEATS}, quick {QUICK_REPEATS})",
    )
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="torch threads of each (default: 1)"
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=SHIPPED_CHUNK,
        metavar="N",
        help=f"tokens per step, ours and continuous batching's (default: {SHIPPED_CHUNK}, what ships)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number, both clocks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
