"""`python -m loadtest`: real servers measured, and placement policies in a simulated cluster.

Finds the command and turns errors into a line and an exit status; the commands are in `loadtest.commands`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from rich.console import Console

from loadtest.client.errors import ClientError
from loadtest.commands import (
    bench_fleet,
    bench_placement,
    bench_routers,
    compare,
    plan,
    replay,
    simulate,
    sweep,
    tune,
)
from loadtest.comparison.errors import BadDeployment, ComparisonError
from loadtest.placement.errors import BadRequest, PlacementError, Stopped
from loadtest.signals import stop_on_signals
from loadtest.simulation.errors import FleetFailed, TooBusy
from loadtest.workloads.errors import WorkloadError

STOPPED = 130  # as a shell reports Ctrl-C
BAD_REQUEST = 2  # as argparse reports it

FILE_WIDTH = 160  # columns when the tables go to a file or a pipe: nothing needs to be cut

DESCRIPTION = """\
Real servers, see docs/benchmarking.md: replay measures one that runs; compare, sweep and bench-fleet start
those that they measure, one after another. bench-routers starts real replicas without a server.

simulate, bench-placement, tune and plan start none of it: they simulate a cluster of replicas under a virtual
clock, with the router, scheduler and cache that run in production and a model's step time instead of a model.
See docs/design/008-simulator.md. Only simulate --validate starts real replicas, to compare with.
"""

# Each module has SUMMARY, DESCRIPTION, add_options(parser) and run(options, console).
COMMANDS: Mapping[str, ModuleType] = {
    "simulate": simulate,
    "bench-placement": bench_placement,
    "bench-routers": bench_routers,
    "tune": tune,
    "plan": plan,
    "replay": replay,
    "compare": compare,
    "sweep": sweep,
    "bench-fleet": bench_fleet,
}


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
    except (PlacementError, WorkloadError, ComparisonError, ClientError, FleetFailed, TooBusy) as error:
        for told in (error, *getattr(error, "__notes__", ())):
            errors.print(f"loadtest: {told}", soft_wrap=True, markup=False)
        return BAD_REQUEST if isinstance(error, BadRequest | WorkloadError | BadDeployment) else 1
    except KeyboardInterrupt:
        errors.print("stopped")
        return STOPPED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=DESCRIPTION, formatter_class=_Formatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name, help=command.SUMMARY, description=command.DESCRIPTION, formatter_class=_Formatter
        )
        command.add_options(own)
        own.set_defaults(run=command.run)
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written."""


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
