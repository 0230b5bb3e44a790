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
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.e2e.faults.checks import Row
from tests.e2e.faults.cluster import stop_clusters

DEFAULT_MINUTES = 3.0
# These are tried first, three on one cluster and three on another; the rest in the order of their names.
_FIRST = ("replica_deaths", "routers", "controller", "deltas", "events", "hang")
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


async def run_all(names: Iterable[str], duration_s: float, console: Console) -> list[Row]:
    """Every row of these promises. One that raises is a row too, missed. Leaves nothing running."""
    found = modules()
    chosen = [found[name] for name in names]
    shares = [getattr(module, "SHARE", 1.0) for module in chosen]
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    rows: list[Row] = []
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for index, (module, share) in enumerate(zip(chosen, shares, strict=True)):
                name = module.__name__.rpartition(".")[2]
                task = progress.add_task(f"{index + 1}/{len(chosen)} {name}")
                began = time.monotonic()
                new = await _try(module, name, duration_s * share / sum(shares), console)
                rows += new
                progress.remove_task(task)
                kept = sum(row.is_kept is not False for row in new)
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


def table(rows: Iterable[Row]) -> Table:
    """Target beside measured."""
    laid_out = Table("", "promise", "target", "measured")
    words = {True: "[green]kept[/]", False: "[bold red]missed[/]", None: "[yellow]told[/]"}
    for row in rows:
        laid_out.add_row(words[row.is_kept], row.promise, row.target, escape(row.measured))
    return laid_out
