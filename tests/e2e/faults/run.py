"""Finds the promises, tries them one after the other, shows how far it is, and lays the rows out.

A promise is a module below `promises/` with

    SHARE: float                                          of the time, beside the others'; 1 if it is absent
    BY_NAME: bool                                         tried only when it is named; False if it is absent
    async def run(duration_s: float) -> list[Row]: ...    duration_s: of load; starting things comes on top
"""

from __future__ import annotations

import asyncio
import importlib
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import stop_clusters

DEFAULT_MINUTES = 3.0
# These are tried first, four on one cluster and three on another; the rest in the order of their names.
_FIRST = ("replica_deaths", "routers", "controller", "proxy", "deltas", "events", "hang")
_PACKAGE = "tests.e2e.faults.promises"


def modules() -> dict[str, ModuleType]:
    """The promises by name, in the order in which they are tried."""
    folder = Path(__file__).parent / "promises"
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    return {name: importlib.import_module(f"{_PACKAGE}.{name}") for name in names}


def usual() -> list[str]:
    """Those that are tried when none is named."""
    return [name for name, module in modules().items() if not getattr(module, "BY_NAME", False)]


async def run_all(
    names: Iterable[str], duration_s: float, console: Console, rows: list[Row] | None = None
) -> list[Row]:
    """Every row of these promises. One that raises is a row too, missed. Leaves nothing running.

    rows: takes them as they come, for whoever may be interrupted; None = a new list.
    """
    found = modules()
    chosen = [found[name] for name in names]
    shares = [getattr(module, "SHARE", 1.0) for module in chosen]
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    rows = [] if rows is None else rows
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for index, (module, share) in enumerate(zip(chosen, shares, strict=True)):
                name = module.__name__.rpartition(".")[2]
                task = progress.add_task(f"{index + 1}/{len(chosen)} {name}")
                began = time.monotonic()
                new = await _try(module, name, duration_s * share / sum(shares), console)
                rows += new
                progress.remove_task(task)
                kept = sum(row.is_kept is not False and row.is_run for row in new)
                console.print(f"{name}: {kept} of {len(new)} kept, {time.monotonic() - began:.0f} s")
    finally:
        await stop_clusters()
    return rows


async def _try(module: ModuleType, name: str, duration_s: float, console: Console) -> list[Row]:
    try:
        found: list[Row] = await module.run(duration_s)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        console.print(traceback.format_exc(), markup=False)
        return [Row(name, "comes to its end", f"{type(error).__name__}: {error}"[:300], False)]
    return found


def summary(rows: Sequence[Row]) -> str:
    """One line: what could not be tried is not among what was kept."""
    missed = sum(row.is_kept is False for row in rows)
    num_run = sum(row.is_run for row in rows)
    said = f"{missed} of {num_run} promises missed" if missed else f"{num_run} promises, none missed"
    num_left = len(rows) - num_run
    return f"{said}; {num_left} not run" if num_left else said


def status(rows: Sequence[Row], *, strict: bool = False) -> int:
    """Exit status: 1 if a promise was missed; strict: also if one could not be tried."""
    return int(any(row.is_kept is False or (strict and not row.is_run) for row in rows))


def table(rows: Iterable[Row]) -> Table:
    """Target beside measured."""
    laid_out = Table("", "promise", "target", "measured")
    words = {True: "[green]kept[/]", False: "[bold red]missed[/]", None: "[yellow]told[/]"}
    for row in rows:
        word = words[row.is_kept] if row.is_run else "[yellow]not run[/]"
        laid_out.add_row(word, row.promise, row.target, escape(row.measured))
    return laid_out
