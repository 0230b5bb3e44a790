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
from benchmarks.contender import CONTINUOUS, GENERATE, NAMES
from benchmarks.pairs import Finding, Ratio
from benchmarks.rows import Row, Verdict
from benchmarks.spans import Span

WIDTH = 100
TITLES = ("warmpath", "generate", "continuous", "/gen", "/cont")
# Label, values of three contenders, two ratios, interval and target: with blanks between not over `WIDTH`.
WIDTHS = (23, 15, 15, 15, 5, 5, 15)


def table(rows: Sequence[Row], models: Sequence[ModelSpec]) -> Table:
    """All rows, by model and section. Fits 100 columns."""
    result = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, width=sum(WIDTHS) + len(WIDTHS) - 1)
    result.add_column("", no_wrap=True, width=WIDTHS[0])
    for title, width in zip(TITLES, WIDTHS[1:-1], strict=True):
        result.add_column(title, justify="right", no_wrap=True, width=width)
    result.add_column("95 %, target", width=WIDTHS[-1])
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
    """What is at or above `generate` and what is not; how many targets were reached, and what was missed."""
    return [*_beside_generate(rows), *_targets(rows)]


def _beside_generate(rows: Sequence[Row]) -> list[str]:
    compared = [(row, row.ratios[GENERATE]) for row in rows if GENERATE in row.ratios]
    if not compared:
        return []
    level = sum(each.finding is Finding.AT_OR_ABOVE for _, each in compared)
    lines = [f"At or above generate (95 %, CPU time): {level} of {len(compared)} cells."]
    lines += [
        f"{each.finding.value.capitalize()}: {row.model}, {row.section}, {row.label}: "
        f"{each.cpu} over {each.num_pairs} pairs."
        for row, each in compared
        if each.finding is not Finding.AT_OR_ABOVE
    ]
    lines += [
        f"Outputs: {row.model}, {row.section}, {row.label}: {row.note}." for row, _ in compared if row.note
    ]
    return lines


def _targets(rows: Sequence[Row]) -> list[str]:
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


def markdown(rows: Sequence[Row]) -> str:
    """The tables of docs/benchmarks/engine.md: per model and section, by CPU time."""
    lines: list[str] = []
    place = ("", "")
    for row in rows:
        if (row.model, row.section) != place:
            place = (row.model, row.section)
            lines += ["", f"**{row.model}, {row.section}**", ""]
            lines += [
                "| | warmpath | generate | continuous | times generate, 95 % | pairs "
                "| times continuous | note |",
                "|---|---:|---:|---:|---:|---:|---:|---|",
            ]
        generate = row.ratios.get(GENERATE)
        cells = [
            row.label,
            *(_plain(row, name) for name in NAMES),
            _interval(generate) if generate else "",
            str(generate.num_pairs) if generate else "",
            _ratio(row, CONTINUOUS).removesuffix("x"),
            "; ".join(_notes(row)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def _plain(row: Row, name: str) -> str:
    if name in row.amounts:
        return f"{row.amounts[name]:,.0f}"
    return number(row.values[name].cpu_s) if name in row.values else ""


def _interval(ratio: Ratio) -> str:
    return f"{ratio.cpu.estimate:.2f} ({ratio.cpu.low:.2f} to {ratio.cpu.high:.2f})"


def _notes(row: Row) -> list[str]:
    """What a cell of plain text says of it beside its numbers."""
    found = [each.finding.value for name, each in row.ratios.items() if name == GENERATE]
    told = [word for word in found if word != Finding.AT_OR_ABOVE.value]
    told += [
        f"target {verdict.required.replace('>= ', '≥ ').replace('<= ', '≤ ')} "
        + ("reached" if verdict.is_reached else "**missed**")
        for verdict in row.verdicts
    ]
    return [*told, row.note] if row.note else told


def _lines(row: Row) -> list[list[str]]:
    """A row's cells; further targets and its note follow on lines of their own."""
    first = [
        row.label,
        *(_value(row, name) for name in NAMES),
        _ratio(row, GENERATE),
        _ratio(row, CONTINUOUS),
    ]
    found = [_found(each) for name, each in row.ratios.items() if name == GENERATE]
    remarks = [*found, *map(_verdict, row.verdicts), *([row.note] if row.note else [])]
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
    return f"{row.ratios[name].cpu.estimate:.2f}x" if name in row.ratios else ""


def _found(ratio: Ratio) -> str:
    """The interval; what it says where that is not the wanted, or there is none."""
    between = f"{ratio.cpu.low:.2f} to {ratio.cpu.high:.2f}"
    match ratio.finding:
        case Finding.AT_OR_ABOVE:
            return f"[green]{between}[/]"
        case Finding.BELOW:
            return f"{between} [red]below[/]"
        case Finding.CANNOT_TELL:
            return f"{between if ratio.num_pairs > 1 else 'one pair:'} [yellow]cannot tell[/]"


def _verdict(verdict: Verdict) -> str:
    colour, word = ("green", "reached") if verdict.is_reached else ("red", "missed")
    return f"{verdict.required.replace('>= ', '≥').replace('<= ', '≤')} [{colour}]{word}[/]"
