"""`make chaos`: do harm to real deployments and hold what happens beside what is promised.

One row per promise; exit status 1 if one is missed. `--minutes` is divided among the promises tried.
Ctrl-C ends it with the rows that there are, and exit status 130.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console

from loadtest.signals import stop_on_signals
from tests.e2e.faults.checks import Row
from tests.e2e.faults.run import DEFAULT_MINUTES, modules, run_all, status, summary, table, usual

INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C


def main(argv: list[str] | None = None) -> int:
    names = list(modules())
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rare = [name for name in names if name not in usual()]
    which = f"which: {', '.join(names)}; default: all but {', '.join(rare)}"
    parser.add_argument("promises", nargs="*", help=which)
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        help="of load, all promises together (default: %(default)s)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit status 1 also for what could not be tried here (no redis-server, a busy machine)",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.promises) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    stop_on_signals()  # whoever ends this ends the clusters with it
    console = Console(highlight=False)
    chosen = [name for name in names if name in arguments.promises] or usual()
    rows: list[Row] = []
    is_interrupted = False
    try:
        asyncio.run(run_all(chosen, arguments.minutes * 60, console, rows))
    except KeyboardInterrupt:  # an hour's rows are worth having without the last ones
        is_interrupted = True
    console.print(table(rows))
    console.print(f"interrupted: {summary(rows)} until then" if is_interrupted else summary(rows))
    return INTERRUPTED if is_interrupted else status(rows, strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
