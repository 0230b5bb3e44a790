"""The one table and its JSON. Knows rows; knows neither engines nor processes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.cases import ModelSpec
from benchmarks.contenders import CONTINUOUS, GENERATE, NAMES
from benchmarks.rows import Row, Verdict
from benchmarks.spans import Span

WIDTH = 100
TITLES = ("warmpath", "generate", "continuous", "/gen", "/cont")
# Label, values of three contenders, two ratios, target: with a blank between them not over `WIDTH`.
WIDTHS = (23, 15, 15, 15, 5, 5, 15)


def table(rows: Sequence[Row], models: Sequence[ModelSpec]) -> Table:
    """All rows, by model and section. Fits 100 columns."""
    result = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, width=sum(WIDTHS) + len(WIDTHS) - 1)
    result.add_column("", no_wrap=True, width=WIDTHS[0])
    for title, width in zip(TITLES, WIDTHS[1:-1], strict=True):
        result.add_column(title, justify="right", no_wrap=True, width=width)
    result.add_column("target", width=WIDTHS[-1])
    for spec in models:
        result.add_row(f"[bold]{spec.name}[/] ({spec.num_parameters / 1e6:.1f}M weights)")
        section = ""
        for row in rows:
            if row.model != spec.name:
                continue
            if row.section != section:
                section = row.section
                result.add_section()
                for heading in textwrap.wrap(section, WIDTHS[0]):
                    result.add_row(f"[italic]{heading}[/]")
            for cells in _lines(row):
                result.add_row(*cells)
        result.add_section()
    return result


def summary(rows: Sequence[Row]) -> list[str]:
    """How many targets were reached, and each that was not."""
    verdicts = [(row, verdict) for row in rows for verdict in row.verdicts]
    if not verdicts:
        return ["No targets: they are for the 132M model."]
    missed = [(row, verdict) for row, verdict in verdicts if not verdict.is_reached]
    lines = [f"Targets reached: {len(verdicts) - len(missed)} of {len(verdicts)}."]
    lines += [
        f"Missed: {row.model}, {row.section}, {row.label}: {verdict.target} is {verdict.measured}, "
        f"wanted {verdict.required}."
        for row, verdict in missed
    ]
    return lines


def write_json(path: Path, rows: Sequence[Row], conditions: dict[str, Any]) -> None:
    """Everything in the table, both clocks, with the conditions it was measured under."""
    document = {"conditions": conditions, "rows": [row.to_json() for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _lines(row: Row) -> list[list[str]]:
    """A row's cells; further targets and its note follow on lines of their own."""
    first = [
        row.label,
        *(_value(row, name) for name in NAMES),
        _ratio(row, GENERATE),
        _ratio(row, CONTINUOUS),
    ]
    remarks = [_verdict(verdict) for verdict in row.verdicts] + ([row.note] if row.note else [])
    padded = remarks or [""]
    return [[*(first if place == 0 else [""] * len(first)), remark] for place, remark in enumerate(padded)]


def _value(row: Row, name: str) -> str:
    if name in row.amounts:
        return f"{row.amounts[name]:,.0f}"
    if name not in row.values:
        return ""
    value: Span = row.values[name]
    return f"{number(value.cpu_s)} {'(' + number(value.wall_s) + ')':>7}"


def number(value: float) -> str:
    """Three digits or more in six characters at most: 0.123, 4.56, 78.9, 1,234, 123k."""
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) < 99_999.5 else f"{value / 1000:,.0f}k"


def _ratio(row: Row, name: str) -> str:
    return f"{row.ratios[name].cpu_s:.2f}x" if name in row.ratios else ""


def _verdict(verdict: Verdict) -> str:
    colour, word = ("green", "reached") if verdict.is_reached else ("red", "missed")
    return f"{verdict.required.replace('>= ', '≥').replace('<= ', '≤')} [{colour}]{word}[/]"
