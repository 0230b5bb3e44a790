"""One table, its summary, its JSON and its plot. Knows rows; measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.overhead.cells import ONE_TOKEN, Prompt
from benchmarks.overhead.modes import Mode
from benchmarks.overhead.results import Row, is_same_coalescing
from benchmarks.overhead.samples import Idle, Part
from benchmarks.rows import Verdict

WIDTH = 100
TITLES = {
    Mode.CALLS: "Serve's default, pieces by its calls, Python proxy",
    Mode.DEFAULT: "Serve's default, Python proxy",
    Mode.THROUGHPUT: "throughput-optimised, Python proxy",
    Mode.FAST: "throughput-optimised, fast proxy (HAProxy)",
}
_COLUMNS = (
    ("", 11),
    ("direct\np50", 6),
    ("added\np10", 6),
    ("\np50", 6),
    ("\np90", 6),
    ("CPU\nproxy", 6),
    ("\nRouter", 6),
    ("\nreplica", 7),
    ("\nadded", 6),
    ("\nall", 6),
    ("\npieces", 6),
    ("\ntarget", 15),
)


def table(rows: Sequence[Row]) -> Table:
    """All rows by mode and kind; times to first token, then CPU, in milliseconds. Fits 100 columns."""
    result = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, width=WIDTH)
    for title, width in _COLUMNS:
        is_text = title in ("", "\ntarget")
        result.add_column(title, justify="left" if is_text else "right", width=width, no_wrap=not is_text)
    for mode, kind in _sections(rows):
        result.add_section()
        result.add_row(f"[bold]{_MODE_WORDS[mode]}[/]\n[italic]{_kind(kind)}[/]")
        for row in rows:
            if (row.mode, row.cell.output_tokens) == (mode, kind):
                result.add_row(*_cells(row))
    return result


_MODE_WORDS = {
    Mode.CALLS: "default by calls",
    Mode.DEFAULT: "default",
    Mode.THROUGHPUT: "throughput",
    Mode.FAST: "fast proxy",
}


def _sections(rows: Sequence[Row]) -> Iterable[tuple[Mode, int]]:
    """Modes, and under each first requests of one token, then streams."""
    return sorted(
        {(row.mode, row.cell.output_tokens) for row in rows},
        key=lambda section: (list(Mode).index(section[0]), section[1]),
    )


def _kind(output_tokens: int) -> str:
    return "one token" if output_tokens == ONE_TOKEN else f"{output_tokens} tokens"


def _cells(row: Row) -> list[str]:
    added = row.added_cpu_ms
    numbers = (
        row.direct.first_p50_ms,
        row.added_first_p10_ms,
        row.added_first_p50_ms,
        row.http.first_p90_ms - row.direct.first_p90_ms,
        *(added[part] for part in Part),
        row.all_added_cpu_ms,
        row.http.whole_cpu_ms,
        row.http.pieces,
    )
    return [
        f"{row.cell.prompt}, {row.cell.concurrency}",
        *(f"{number:.1f}" for number in numbers),
        "\n".join(_remark(verdict) for verdict in row.verdicts),
    ]


def _remark(verdict: Verdict) -> str:
    colour, word = ("green", "reached") if verdict.is_reached else ("red", "missed")
    limit = verdict.required.removeprefix("<= ").replace(" ms", "")
    return f"{verdict.measured.replace(' ms', '')}≤{limit} [{colour}]{word}[/]"


def background(rows: Sequence[Row], idle: Iterable[Idle]) -> list[str]:
    """What is not in "added", a line for each mode: what servers use for nobody, and Routers for hearing."""
    lines = []
    for each in idle:
        heard = [row for row in rows if row.mode is each.mode and row.cell.output_tokens != ONE_TOKEN]
        used = ", ".join(f"{part} {1000 * each.cpu_share[part]:.0f}" for part in Part)
        by_cell = ", ".join(
            f"{row.hearing_cpu_ms:.1f} ({row.cell.prompt}, {row.cell.concurrency})" for row in heard
        )
        lines.append(
            f"{_MODE_WORDS[each.mode]}, not in added: idle, CPU-ms a second: {used}"
            + (f"; Router hearing of engines, CPU-ms per stream: {by_cell}." if heard else ".")
        )
    return lines


def beside_default(rows: Sequence[Row]) -> list[str]:
    """Streams' CPU of proxy and Router, which is what the mode can change, over default's; and all of it over
    what Serve's default takes that carries the pieces to the Router as well.

    Of cells that came in as many pieces, as the target is. [] where only one of both was measured.
    """
    streams = {(row.mode, row.cell): row for row in rows if row.cell.output_tokens != ONE_TOKEN}
    passing = "throughput over default, proxy and Router alone, CPU per stream"
    whole = "throughput over default by calls, engines included, CPU per stream"
    compared: tuple[tuple[str, Mode, Callable[[Row], float]], ...] = (
        (passing, Mode.DEFAULT, lambda row: row.passing_cpu_ms),
        (whole, Mode.CALLS, lambda row: row.http.whole_cpu_ms),
    )
    lines = []
    for title, other, measure in compared:
        ratios = [
            f"{measure(row) / measure(beside):.2f}x ({cell.prompt}, {cell.concurrency})"
            for (mode, cell), row in streams.items()
            if mode is Mode.THROUGHPUT
            and (beside := streams.get((other, cell))) is not None
            and is_same_coalescing(row, beside)
        ]
        if ratios:
            lines.append(f"{title}: {', '.join(ratios)}.")
    return lines


def summary(rows: Sequence[Row]) -> list[str]:
    """How many targets were reached, and each that was not."""
    judged = [(row, verdict) for row in rows for verdict in row.verdicts]
    if not judged:
        return ["No targets: they are for the fast proxy, and for throughput-optimised beside default."]
    missed = [(row, verdict) for row, verdict in judged if not verdict.is_reached]
    lines = [f"Targets reached: {len(judged) - len(missed)} of {len(judged)}."]
    lines += [
        f"Missed: {TITLES[row.mode]}, {row.cell.label}: {verdict.target} is {verdict.measured}, "
        f"wanted {verdict.required}."
        for row, verdict in missed
    ]
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The same table for docs/benchmarks/proxy.md."""
    lines = []
    for mode, kind in _sections(rows):
        lines += [
            f"**{TITLES[mode]}: {_kind(kind)}**",
            "",
            "| prompts, at a time | direct p50 | added p10 | p50 | p90 | proxy CPU | Router | replica "
            "| added | all | pieces | hearing | target |",
            "|---|" + "---:|" * 11 + "---|",
        ]
        for row in rows:
            if (row.mode, row.cell.output_tokens) == (mode, kind):
                cells = _cells(row)
                targets = "; ".join(
                    f"{v.target} {v.required}: {v.measured}, {'reached' if v.is_reached else '**missed**'}"
                    for v in row.verdicts
                )
                hearing = f"{row.hearing_cpu_ms:.1f}"
                lines.append("| " + " | ".join([*cells[:-1], hearing, targets]) + " |")
        lines.append("")
    return "\n".join(lines)


def write_json(path: Path, rows: Sequence[Row], conditions: dict[str, Any]) -> None:
    """Everything in the table with the targets, and the conditions it was measured under."""
    listed = [
        {
            **asdict(row),
            "all_added_cpu_ms": row.all_added_cpu_ms,
            "hearing_cpu_ms": row.hearing_cpu_ms,
        }
        for row in rows
    ]
    path.write_text(json.dumps({"conditions": conditions, "rows": listed}, indent=2) + "\n")


def plot(path: Path, rows: Sequence[Row]) -> None:
    """CPU of a stream by process, mode beside mode, at every concurrency. Needs matplotlib."""
    from matplotlib.figure import Figure

    streams = [row for row in rows if row.cell.output_tokens != ONE_TOKEN and row.cell.prompt is Prompt.SMALL]
    modes = list(dict.fromkeys(row.mode for row in streams))
    figure = Figure(figsize=(3.2 * len(modes), 3.4), layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        of_mode = [row for row in streams if row.mode is mode]
        names = [str(row.cell.concurrency) for row in of_mode]
        base = [0.0] * len(of_mode)
        for part in Part:
            heights = [max(0.0, row.http.cpu_ms[part]) for row in of_mode]
            panel.bar(names, heights, bottom=base, label=part.value)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        panel.set_title(_MODE_WORDS[mode], fontsize=10)
        panel.set_xlabel("streams at a time")
    panels[0].set_ylabel("CPU-ms per 100-token stream")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
