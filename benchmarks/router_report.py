"""Rows of the router's benchmark, what they have to reach, one table and its JSON. Knows no router."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.report import number
from benchmarks.router_timing import Spread
from benchmarks.rows import Verdict

WIDTH = 100
JUDGED_REPLICAS = 64
JUDGED_BLOCKS = "1,000,000 blocks"


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: times of ours and, where it has the like, of Ray's tree; or an amount."""

    section: str
    label: str
    ours: Spread | None = None
    ray: Spread | None = None
    amount: float | None = None
    ray_amount: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Times as fast as Ray's, or as small."""
        if self.ours is not None and self.ray is not None:
            return self.ray.p50_us / self.ours.p50_us if self.ours.p50_us else None
        if self.amount and self.ray_amount is not None:
            return self.ray_amount / self.amount
        return None


def verdicts(row: Row) -> list[Verdict]:
    """The targets that apply to a row. Judged on CPU time, at 64 replicas."""
    if "event loop" in row.section:
        return [_time("stall p99", 2000, row.ours.p99_us)] if row.ours and "CPU" in row.label else []
    if row.label.startswith("bytes per block"):
        return [] if row.amount is None else [_at_most("bytes per block", 60, row.amount, "")]
    if row.label.startswith("byte gauge"):
        if row.amount is None or JUDGED_BLOCKS not in row.section:
            return []  # a megabyte of the allocator's own is a tenth of a small index
        off = abs(row.amount - 1)
        return [Verdict("gauge off by", "<= 10 %", f"{100 * off:.1f} %", off <= 0.1)]
    if f"{JUDGED_REPLICAS} replicas" not in row.section or row.ours is None:
        return []
    if row.label == "a replica leaves":
        return [_time("longest call", 2000, row.ours.max_us)]
    return [_time(f"{row.label} p50", limit, row.ours.p50_us) for limit in _limits(row)]


def _limits(row: Row) -> list[float]:
    """Microseconds, of the median."""
    if row.label.startswith("match 8k"):
        return [10]
    if row.label == "whole 8k, next turn":
        return [200]
    if row.label.startswith(("whole 8k", "queued 8k")):
        return [200 if "xxh3" in row.section else 400]
    return []


def table(rows: Sequence[Row]) -> Table:
    """All rows, by section. Fits 100 columns."""
    result = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), width=WIDTH)
    for title, width in (
        ("", 36),
        ("p50 us", 8),
        ("p99 us", 8),
        ("Ray p50", 8),
        ("Ray p99", 8),
        ("x", 7),
        ("", 17),
    ):
        result.add_column(
            title, justify="left" if not title else "right", width=width, no_wrap=bool(width < 17)
        )
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            result.add_section()
            result.add_row(f"[bold]{section}[/]")
        result.add_row(*_cells(row))
    return result


def _cells(row: Row) -> list[str]:
    if row.ours is not None:
        times = [number(row.ours.p50_us), number(row.ours.p99_us)]
        times += [number(row.ray.p50_us), number(row.ray.p99_us)] if row.ray else ["", ""]
    else:
        times = [number(row.amount) if row.amount is not None else "", ""]
        times += [number(row.ray_amount) if row.ray_amount is not None else "", ""]
    ratio = f"{number(row.ratio)}x" if row.ratio is not None else ""
    remarks = [_remark(verdict) for verdict in verdicts(row)] + ([row.note] if row.note else [])
    return [row.label, *times, ratio, "\n".join(remarks)]


def _remark(verdict: Verdict) -> str:
    colour, word = ("green", "reached") if verdict.is_reached else ("red", "missed")
    return f"{verdict.required.replace('<= ', '≤')} [{colour}]{word}[/]"


def summary(rows: Sequence[Row]) -> list[str]:
    """How many targets were reached, and each that was not."""
    judged = [(row, verdict) for row in rows for verdict in verdicts(row)]
    if not judged:
        return ["No targets: they are for 64 replicas and 8k-token prompts."]
    missed = [(row, verdict) for row, verdict in judged if not verdict.is_reached]
    lines = [f"Targets reached: {len(judged) - len(missed)} of {len(judged)}."]
    lines += [
        f"Missed: {row.section}: {verdict.target} is {verdict.measured}, wanted {verdict.required}."
        for row, verdict in missed
    ]
    return lines


def write_json(path: Path, rows: Sequence[Row], conditions: dict[str, Any]) -> None:
    """Everything in the table, both clocks, with the targets and the conditions."""
    listed = [{**asdict(row), "verdicts": [asdict(verdict) for verdict in verdicts(row)]} for row in rows]
    path.write_text(json.dumps({"conditions": conditions, "rows": listed}, indent=2) + "\n")


def _time(name: str, limit_us: float, measured_us: float) -> Verdict:
    return _at_most(name, limit_us, measured_us, " us")


def _at_most(name: str, limit: float, measured: float, unit: str) -> Verdict:
    return Verdict(name, f"<= {limit:g}{unit}", f"{number(measured)}{unit}", measured <= limit)
