"""`make bench-schedule`: what the scheduler promises, measured; the orders of its queue beside each other.

Wires arguments, progress and tables together. Knows no measurement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.arguments import positive
from benchmarks.schedule import host_memory, idle, orders, stall, tenants
from benchmarks.schedule.rows import Section, missed, table
from benchmarks.stopping import stoppable
from cache.scheduling_order import SchedulingOrder

DESCRIPTION = """\
Measure the engine's scheduler.

  stall     a prompt of 4,096 tokens arrives at 8 sequences that decode: the time between their tokens, on a
            simulated engine (virtual clock) and on a 9M model (CPU time), with `itl_target_s: null`
            (target: p99 at most twice what it was) and without a limit, as it ships; beside each, what it is
            when no prompt comes
  tenants   one tenant asks for ten times its share: the other's time to first token, on an engine under a
            virtual clock, alone and behind a Router. Target: p99 at most 1.5 times what it was
  host      host memory behind the pool, by a virtual clock: more conversations than the pool holds, and
            answers that outgrow it. Target: its bytes stay under their cap
  idle      what a device waits for between two steps, one by one and begun ahead: simulated, by the real
            clock. Target: at most half
  orders    first come; shortest uncached prefill first, aging; the same, standing back for shorter ones: on
            a simulated fleet behind production's Router, bound late and at once
"""
EPILOG = """\
examples:
  make bench-schedule                                              everything
  python -m benchmarks.schedule --only stall idle --repeats 5
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False, width=110)
    began_s = time.monotonic()
    sections: list[Section] = []
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=_num_parts(options.repeats, options.only))

        def advance(description: str) -> None:
            progress.update(task, advance=1, description=description)

        if "stall" in options.only:
            sections.append(stall.measure(advance, options.repeats))
        if "tenants" in options.only:
            sections.append(tenants.measure(advance, options.seeds))
        if "host" in options.only:
            sections += host_memory.measure(advance, options.seeds)
        if "idle" in options.only:
            sections.append(idle.measure(advance, options.repeats))
        if "orders" in options.only:
            sections.append(orders.measure(advance, options.seeds))
    for section in sections:
        console.print(table(section))
        console.print()
    console.print(machine.describe(1), soft_wrap=True)
    console.print(f"{time.monotonic() - began_s:.0f} s")
    for line in missed(sections):
        console.print(f"Missed: {line}", soft_wrap=True)
    return 1 if missed(sections) else 0


def _num_parts(repeats: int, only: Sequence[str]) -> int:
    """How often `advance` is called."""
    parts = {
        "stall": 2 + 2 * repeats,
        "tenants": 7,
        "host": len(host_memory.HOST_BLOCKS) + 3,
        "idle": len(idle.BATCHES),
        "orders": len(orders.BINDINGS) * len(orders.LOADS) * len(SchedulingOrder),
    }
    return sum(parts[name] for name in only)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedule",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ("stall", "tenants", "host", "idle", "orders")
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=parts, metavar="PART", help=f"of {', '.join(parts)}"
    )
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="of the real engine")
    parser.add_argument("--seeds", type=positive, default=2, metavar="N", help="windows, and draws")
    return parser


if __name__ == "__main__":
    sys.exit(stoppable(main))
