"""`make chaos`: do harm to real deployments and hold what happens beside what is promised.

One row per promise; exit status 1 if one is missed. `--minutes` is divided among the promises tried.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console

from loadtest.signals import stop_on_signals
from tests.e2e.faults.run import DEFAULT_MINUTES, modules, run_all, table, usual


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
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.promises) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    stop_on_signals()  # whoever ends this ends the clusters with it
    console = Console(highlight=False)
    chosen = [name for name in names if name in arguments.promises] or usual()
    rows = asyncio.run(run_all(chosen, arguments.minutes * 60, console))
    console.print(table(rows))
    missed = sum(row.is_kept is False for row in rows)
    console.print(
        f"{missed} of {len(rows)} promises missed" if missed else f"{len(rows)} promises, none missed"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
