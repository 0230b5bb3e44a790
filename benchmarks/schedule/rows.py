"""What the benchmark of scheduling says: lines of one table, some of them with a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

Advance = Callable[[str], None]
"""Told what is measured next."""


@dataclass(frozen=True, slots=True)
class Line:
    """One case."""

    case: str
    cells: tuple[str, ...]  # one for each column of its section
    target: str = ""  # "" = none; it is only there to compare with
    is_reached: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """Lines with the same columns."""

    title: str
    columns: tuple[str, ...]
    lines: list[Line] = field(default_factory=list)


def table(section: Section) -> Table:
    """Fits 110 columns."""
    result = Table(title=section.title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    result.add_column("")
    for column in section.columns:
        result.add_column(column, justify="right")
    result.add_column("target")
    for line in section.lines:
        verdict = f"{line.target}: {'reached' if line.is_reached else '[bold red]missed[/]'}"
        result.add_row(line.case, *line.cells, verdict if line.target else "")
    return result


def missed(sections: Sequence[Section]) -> list[str]:
    """Each target that was not reached, by section and case."""
    return [
        f"{section.title}: {line.case}: wanted {line.target}"
        for section in sections
        for line in section.lines
        if line.target and not line.is_reached
    ]
