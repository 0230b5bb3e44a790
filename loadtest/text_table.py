"""A table of text: as Markdown, and on a terminal however narrow. Knows nothing of what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WRAPPED_CHARS = 60
UNBOUNDED = 10_000  # wider than any table


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of text under a title; the first column is a name, the others are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _markdown_row(self.columns)]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += [_markdown_row(row) for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines)

    def print_on(self, console: Console) -> None:
        """Whole: columns that do not fit beside the others follow in a table below, names repeated."""
        parts = list(self._parts(console))
        for part in parts:
            if part is parts[0]:
                console.print(Text(self.title, style="bold"))
            console.print(part._rich())
        if self.note:
            console.print(Text(self.note, style="dim"))

    def _parts(self, console: Console) -> Iterator[TextTable]:
        chosen: list[int] = []
        for place in range(1, len(self.columns)):
            if chosen and not self._of([*chosen, place])._fits(console):
                yield self._of(chosen)
                chosen = []
            chosen.append(place)
        yield self._of(chosen)

    def _of(self, places: Sequence[int]) -> TextTable:
        kept = [0, *places]
        return replace(
            self,
            columns=tuple([self.columns[place] for place in kept]),
            rows=tuple([tuple([row[place] for place in kept]) for row in self.rows]),
        )

    def _fits(self, console: Console) -> bool:
        unbounded = console.options.update(width=UNBOUNDED)
        return Measurement.get(console, unbounded, self._rich()).maximum <= console.width

    def _rich(self) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(self.columns):
            longest = max((len(row[place]) for row in self.rows), default=0)
            is_prose = longest > WRAPPED_CHARS  # a list of knobs, say: better on several lines than cut
            table.add_column(
                Text(column),
                justify="left" if not place or is_prose else "right",
                no_wrap=not is_prose,
                max_width=WRAPPED_CHARS if is_prose else None,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
