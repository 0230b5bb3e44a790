"""A bar of what is done on the terminal, with the time it may still take and how it looks so far."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def bar_with_time_left(console: Console, *, is_transient: bool = False) -> Progress:
    """Each task has a field `told`: what is known so far. is_transient: gone when it stops."""
    return Progress(
        TextColumn("{task.description}", markup=False),  # addresses have brackets: http://[fd00::1]:8000
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=is_transient),
        TextColumn("{task.fields[told]}", markup=False),
        console=console,
        transient=is_transient,
    )
