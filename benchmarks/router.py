"""`make bench-router`: the router's index and its whole decision, beside Ray Serve's own prefix tree.

Wires arguments, progress and the report together. Knows no measurement.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import router_decision, router_index, router_report, router_stall
from benchmarks.arguments import positive, to_write
from benchmarks.machine import CPUINFO, commit, cpu_name
from benchmarks.router_index import Advance
from benchmarks.router_report import Row
from benchmarks.router_workload import BLOCK_SIZE, Fleet
from benchmarks.stopping import STOPPED
from cache.counted import counted

PARTS = ("index", "decision", "stall")
SIZES = {"1k": 64, "8k": 512, "32k": 2048}
PACKAGES = ("ray", "numpy", "xxhash")

DESCRIPTION = f"""\
Measure the router's brain in this process, with no network and no actors.

Parts of the table:
  index      match (nothing, half, all of the prompt held somewhere), insert, remove, a replica leaving, and
             memory, beside the prefix tree of Ray Serve's PrefixCacheAffinityRouter. Ours holds block hashes,
             {BLOCK_SIZE} tokens each; Ray's holds text, four characters a token. Its calls are made in this
             process too: in production each of them is a remote call to an actor.
  decision   from packed token ids to a booked replica: hash, match, cost, reserve, predict; with each hash,
             and for the next turn of a conversation, whose old blocks are not hashed again. "queued" is the
             same where each replica has a longer prompt waiting that would stand back. "choose" is all but
             hashing.
  stall      64 requests at once and 10,000 blocks/s of events, stored and removed, through one event loop:
             the time during which it looked after nobody else.

How it is measured:
  Fleets of 8 and 64 replicas with a million distinct blocks: conversations of 2k, 8k and 32k tokens that
  begin with one system prompt. Every call is timed by itself, on the thread's CPU clock (so that other
  processes do not count) and the wall clock (in --json); garbage collection is on. "x": times as fast, or as
  small, as Ray's.
"""
EPILOG = """\
examples:
  make bench-router                                                everything, a few minutes
  make bench-router ARGS="--quick"                                 a tenth of the blocks and samples, 8k only
  python -m benchmarks.router --parts index --replicas 64 --json out.json
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    parts: Sequence[str]
    fleets: Sequence[int]  # how many replicas each has
    blocks: int  # distinct ones in a fleet
    sizes: Sequence[int]  # of prompts, in blocks
    share: float  # of the samples that a whole run takes


def main(argv: Sequence[str] | None = None) -> int:
    """0: all was measured; 1: this Ray has no prefix tree; STOPPED: Ctrl-C, rows before it are told."""
    parser = _parser()
    options = parser.parse_args(argv)
    plan = _plan(options, parser)
    began_s = time.monotonic()
    rows: list[Row] = []
    status = 0
    try:
        with _quietly(), _progress() as advance:
            rows.extend(_rows(plan, advance))  # those before Ctrl-C are in it
    except ImportError as error:
        _complain(f"no prefix tree in this Ray: {error}")
        return 1
    except KeyboardInterrupt:
        status = STOPPED
        _complain(f"interrupted with {counted(len(rows), 'row')} measured")
        if not rows:
            return status
    conditions = {
        "machine": _describe(),
        "took_s": round(time.monotonic() - began_s),
        "blocks": plan.blocks,
        "block_size": BLOCK_SIZE,
        "clock": "microseconds of the thread's CPU time; wall_* of wall time",
        **({"cut_short": True} if status else {}),
    }
    _show(rows, conditions)
    if options.json is not None:
        router_report.write_json(options.json, rows, conditions)
    return status


def _plan(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Plan:
    """Ends the command where the fleets cannot hold the prompts."""
    is_quick = options.quick
    plan = Plan(
        parts=options.parts,
        fleets=options.replicas,
        blocks=options.blocks or (100_000 if is_quick else 1_000_000),
        sizes=[SIZES[name] for name in options.prompts or (["8k"] if is_quick else SIZES)],
        share=0.2 if is_quick else 1.0,
    )
    stalled = [router_stall.PROMPT_BLOCKS] if "stall" in plan.parts else []
    least = Fleet.least_blocks(max(plan.fleets), max([*plan.sizes, *stalled]))
    if plan.blocks < least:
        parser.error(
            f"argument --blocks: {plan.blocks:,} is not at least {least:,}, which the longest prompts take "
            f"on {max(plan.fleets)} replicas"
        )
    return plan


def _rows(plan: Plan, advance: Advance) -> Iterator[Row]:
    for num_replicas in plan.fleets:
        fleet = Fleet(num_replicas, plan.blocks)
        if "index" in plan.parts:
            yield from router_index.rows(fleet, plan.sizes, plan.share, advance)
        if "decision" in plan.parts:
            yield from router_decision.rows(fleet, plan.sizes, plan.share, advance)
    if "stall" in plan.parts:
        yield from router_stall.rows(Fleet(max(plan.fleets), plan.blocks), 20 * plan.share, advance)


@contextmanager
def _progress() -> Iterator[Advance]:
    """A line that tells what is measured now, gone when it ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting")

        def advance(description: str) -> None:
            progress.update(task, description=description)

        yield advance


def _show(rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
    console = Console(highlight=False, width=router_report.WIDTH)
    if "cut_short" in conditions:
        console.print("[yellow]Cut short: rows that were not measured yet are not here.[/]")
    console.print(router_report.table(rows))
    console.print(conditions["machine"])
    console.print(f"microseconds of CPU time; {conditions['blocks']:,} blocks; {conditions['took_s']} s")
    for line in router_report.summary(rows):
        console.print(line)


def _complain(problem: str) -> None:
    Console(stderr=True).print(f"[bold red]bench-router:[/] {problem}", highlight=False)


def _describe() -> str:
    """CPU, cores, versions, commit: one line."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"{cpu_name(text)}, {counted(os.cpu_count() or 1, 'core')}, Python {platform.python_version()}, "
        f"{versions}, git {commit(Path(__file__).parent)}"
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Answers here take what they take: that replicas are late for it is no news, and tears the progress."""
    log = logging.getLogger("router")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the blocks, fewer samples, 8k prompts"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--replicas", nargs="+", type=positive, default=[8, 64], metavar="N", help="fleets (default: 8 64)"
    )
    parser.add_argument(
        "--prompts", nargs="+", choices=list(SIZES), metavar="SIZE", help="1k, 8k, 32k tokens"
    )
    parser.add_argument("--blocks", type=positive, metavar="N", help="distinct blocks (default: 1,000,000)")
    parser.add_argument("--json", type=to_write, metavar="FILE", help="also write every number, both clocks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
