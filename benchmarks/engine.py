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
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks import cases, machine, report
from benchmarks.arguments import positive, to_write
from benchmarks.cases import Cell, ModelSpec, Pairs, Plan, exactly
from benchmarks.contender import NAMES
from benchmarks.kept import KeptCells
from benchmarks.measure import Bench, cell_work
from benchmarks.rows import Row
from benchmarks.stopping import STOPPED
from benchmarks.worker import Worker, WorkerFailed
from cache.counted import counted
from replica.config import ReplicaConfig

QUICK_PAIRS = 2
CUT_SHORT = "Cut short: cells that were not measured yet are not here."
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
  Each contender is a process of its own with its own copy of the model. Ours and generate answer the same
  prompts one right after the other, each first in turn: a pair. A cell has as many pairs as fit into some
  seconds, 3 to 12 of them; continuous batching runs beside the first one or two. Numbers are medians: per
  second of CPU time first, in brackets per second of wall time; ratios (over 1: warmpath is faster) are
  geometric means of the pairs' ratios of CPU time, with their 95 % interval (Student's t over logarithms).
  A cell is "at or above" generate where all of the interval is, "below" where none of it is, and else one
  "cannot tell". With one torch thread both clocks agree on an idle machine; on a busy one only CPU time is
  worth reading.
  "Prefill" is that of answers of one token; "decodes beside" the time until every sequence has its first
  token where answers are longer, so that the first to have theirs decode on beside the last, which generate's
  never do; "steady decode" that of steps in which every sequence decodes, step by step. Loading, warming up
  and allocating pools are never timed. Greedy, float32; outputs are compared with generate's and a row whose
  outputs differ says so.
"""
EPILOG = """\
examples:
  make bench-engine                                            everything, some twelve minutes
  make bench-engine ARGS="--resume /tmp/run.jsonl"             the same, to be gone on with if cut off
  make bench-engine ARGS="--quick"                             the 9M model with fewer pairs, a minute
  python -m benchmarks.engine --models 132M --only batch-32 --pairs 6
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    complaints = Console(stderr=True, soft_wrap=True, highlight=False)
    where = machine.describe(options.threads)
    began_s = time.monotonic()
    try:
        plan = _plan(options)
        measured_with = {
            "machine": where,
            "max_batched_tokens": options.chunk,
            "torch_threads": options.threads,
            "pairs": asdict(plan.pairs),
        }
        kept = KeptCells(options.resume, measured_with)
    except ValueError as error:
        complaints.print(f"[bold red]bench-engine:[/] {escape(str(error))}")
        return 2
    console = Console(highlight=False)
    status = 0
    try:
        measure(plan, kept, threads=options.threads, chunk=options.chunk, console=console)
    except WorkerFailed as error:
        complaints.print(f"[bold red]bench-engine:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        status = STOPPED
        complaints.print(f"[bold red]bench-engine:[/] {escape(_interrupted(plan, kept, options.resume))}")
    rows = measured(plan, kept)
    if status and not rows:
        return status
    conditions = {
        **measured_with,
        "took_s": round(time.monotonic() - began_s),
        "clock": "medians; `cpu_s` CPU seconds, `wall_s` wall seconds, in the section's unit; "
        "`ratios` [estimate, low, high]",
        **({"cut_short": True} if status else {}),
    }
    print_report(rows, plan, conditions, Console(highlight=False, width=report.WIDTH))
    if options.json is not None:
        report.write_json(options.json, rows, conditions)
    if options.markdown is not None:
        cut_short = f"**{CUT_SHORT}**\n\n" if status else ""
        options.markdown.write_text(cut_short + report.markdown(rows))
    return status


def _interrupted(plan: Plan, kept: KeptCells, resume: Path | None) -> str:
    num_left = sum(len(_left(spec, plan, kept)) for spec in plan.models)
    num_cells = len(plan.models) * len(plan.cells)
    told = f"interrupted with {num_cells - num_left} of {counted(num_cells, 'cell')} measured"
    return told if resume is None else f"{told}, and {resume} keeps them: the same command goes on from there"


def _plan(options: argparse.Namespace) -> Plan:
    """Raises UnknownCells."""
    names = options.models or (["9M"] if options.quick else list(cases.MODELS))
    models = tuple(cases.MODELS[name] for name in names)
    usual = exactly(QUICK_PAIRS) if options.quick else Pairs()
    make_plan = cases.quick_plan if options.quick else cases.full_plan
    plan = make_plan(models, exactly(options.pairs) if options.pairs else usual)
    return plan.only(options.only) if options.only else plan


def measure(plan: Plan, kept: KeptCells, *, threads: int, chunk: int, console: Console) -> None:
    """Run what is not kept yet, showing progress. Raises WorkerFailed; leaves no process behind, and no file
    but the kept one."""
    columns = (TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    left = {spec: _left(spec, plan, kept) for spec in plan.models}
    with (
        tempfile.TemporaryDirectory(prefix="warmpath-bench-") as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        total = sum(cell_work(spec, plan, cell) for spec, cells in left.items() for cell in cells)
        task = progress.add_task("starting", total=total)

        def advance(description: str, work: float) -> None:
            progress.update(task, advance=work, description=description or None)

        for spec, cells in left.items():
            if not cells:
                continue
            with ExitStack() as stack:
                advance(f"{spec.name}: drawing weights, loading", 0.0)
                workers = _start(stack, spec, plan, Path(folder), threads, chunk)
                bench = Bench(spec, plan, workers, advance)
                for cell in cells:
                    kept.keep(spec.name, cell.name, bench.rows(cell))


def measured(plan: Plan, kept: KeptCells) -> list[Row]:
    """What is known of the plan, in its order."""
    return [
        row for spec in plan.models for cell in plan.cells for row in kept.rows(spec.name, cell.name) or ()
    ]


def _left(spec: ModelSpec, plan: Plan, kept: KeptCells) -> list[Cell]:
    return [cell for cell in plan.cells if kept.rows(spec.name, cell.name) is None]


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
    if "cut_short" in conditions:
        console.print(f"[yellow]{CUT_SHORT}[/]")
    console.print(report.table(rows, plan.models))
    console.print(conditions["machine"], soft_wrap=False)
    console.print(
        "CPU time (wall time); /gen and /cont: times as fast as each, by CPU time, 95 % beside; "
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
        "--only",
        nargs="+",
        metavar="CELL",
        help="cells by name: batch-1, -8, -32, first-1024, first-4096, whole-1x257 and so on, caching",
    )
    parser.add_argument(
        "--pairs",
        type=positive,
        metavar="N",
        help=f"so many of each cell (default: by time, 3 to 12; quick: {QUICK_PAIRS})",
    )
    parser.add_argument(
        "--resume",
        type=to_write,
        metavar="FILE",
        help="keep measured cells there, and measure only what it lacks; made where it is missing",
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
    parser.add_argument("--json", type=to_write, metavar="FILE", help="also write every number, both clocks")
    parser.add_argument(
        "--markdown",
        type=to_write,
        metavar="FILE",
        help="also write the tables of docs/benchmarks/engine.md",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
