"""From samples to what a path adds, and what it had to. Pure.

Added is what goes through proxy and Router minus the same requests sent to the replicas directly, process by
process: the engines' own work is in both, and so is the Router's hearing of their load and caches, which goes
on whoever calls them and is shown for itself. What the servers use with nobody asking is taken off first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.overhead.cells import ONE_TOKEN, Cell, Path, Prompt
from benchmarks.overhead.modes import Mode
from benchmarks.overhead.samples import Idle, Part, Run, Tokenizing
from benchmarks.router_timing import quantile
from benchmarks.rows import Verdict

FIRST_TOKEN_MS = 5.0  # added at the median, one request at a time
STREAM_CPU_MS = 10.0  # of CPU, added per stream
DEFAULT_SHARE = 0.6  # throughput-optimised over default, CPU of a stream in all
SAME_COALESCING = 1.15  # pieces per stream may differ by this factor and still be called the same


@dataclass(frozen=True, slots=True)
class PathResult:
    """A cell's requests over one path. Milliseconds; CPU per request, without what idle servers use."""

    num_requests: int
    first_p10_ms: float
    first_p50_ms: float
    first_p90_ms: float
    cpu_ms: Mapping[Part, float]
    pieces: float  # per answer: events, or items

    @property
    def whole_cpu_ms(self) -> float:
        return sum(self.cpu_ms.values())


@dataclass(frozen=True, slots=True)
class Row:
    """One cell under one mode."""

    mode: Mode
    cell: Cell
    direct: PathResult
    http: PathResult
    verdicts: tuple[Verdict, ...] = ()

    @property
    def added_first_p50_ms(self) -> float:
        return self.http.first_p50_ms - self.direct.first_p50_ms

    @property
    def added_first_p10_ms(self) -> float:
        """Where the machine is busy with other things, its quiet moments."""
        return self.http.first_p10_ms - self.direct.first_p10_ms

    @property
    def added_cpu_ms(self) -> Mapping[Part, float]:
        return {part: self.http.cpu_ms[part] - self.direct.cpu_ms[part] for part in Part}

    @property
    def hearing_cpu_ms(self) -> float:
        """What the Router uses for a request that goes past it: engines tell it of their work."""
        return self.direct.cpu_ms[Part.ROUTER]

    @property
    def passing_cpu_ms(self) -> float:
        """What proxy and Router use for a request that goes through them."""
        return self.http.cpu_ms[Part.PROXY] + self.http.cpu_ms[Part.ROUTER]

    @property
    def all_added_cpu_ms(self) -> float:
        return sum(self.added_cpu_ms.values())


def rows_of(runs: Iterable[Run], idle: Iterable[Idle], tokenizing: Iterable[Tokenizing]) -> list[Row]:
    """A row per mode and cell, in the order they were measured, with the targets that apply."""
    shares = {each.mode: each.cpu_share for each in idle}
    grouped: dict[tuple[Mode, Cell], dict[Path, list[Run]]] = {}
    for run in runs:
        grouped.setdefault((run.mode, run.cell), {}).setdefault(run.path, []).append(run)
    rows = [
        Row(
            mode,
            cell,
            path_result(paths[Path.DIRECT], shares[mode]),
            path_result(paths[Path.HTTP], shares[mode]),
        )
        for (mode, cell), paths in grouped.items()
        if len(paths) == len(Path)
    ]
    new_s: dict[str, list[float]] = {}
    for each in tokenizing:
        new_s.setdefault(each.prompt, []).append(each.new_s)
    tokenizing_ms = {prompt: 1000 * min(times) for prompt, times in new_s.items()}
    by_key = {(row.mode, row.cell): row for row in rows}
    return [replace(row, verdicts=tuple(_verdicts(row, by_key, tokenizing_ms))) for row in rows]


def path_result(runs: Sequence[Run], idle_share: Mapping[Part, float]) -> PathResult:
    """idle_share: CPU seconds per second of each part with nobody asking."""
    samples = [sample for run in runs for sample in run.samples]
    first_ms = sorted(1000 * sample.first_s for sample in samples)
    wall_s = sum(run.wall_s for run in runs)
    return PathResult(
        num_requests=len(samples),
        first_p10_ms=quantile(first_ms, 0.1),
        first_p50_ms=quantile(first_ms, 0.5),
        first_p90_ms=quantile(first_ms, 0.9),
        cpu_ms={
            part: 1000 * (sum(run.cpu_s[part] for run in runs) - idle_share[part] * wall_s) / len(samples)
            for part in Part
        },
        pieces=fmean(sample.num_pieces for sample in samples),
    )


def _verdicts(
    row: Row, rows: Mapping[tuple[Mode, Cell], Row], tokenizing_ms: Mapping[str, float]
) -> Iterable[Verdict]:
    is_stream = row.cell.output_tokens != ONE_TOKEN
    if row.mode is Mode.FAST and not is_stream and row.cell.concurrency == 1:
        allowed_ms = FIRST_TOKEN_MS
        if row.cell.prompt is Prompt.LONG:
            allowed_ms += tokenizing_ms.get(row.cell.prompt, 0.0)
        yield _at_most("first token added, p50", allowed_ms, row.added_first_p50_ms)
    if row.mode is Mode.FAST and is_stream:
        yield _at_most("CPU added per stream", STREAM_CPU_MS, row.all_added_cpu_ms)
    default = rows.get((Mode.DEFAULT, row.cell))
    if row.mode is Mode.THROUGHPUT and is_stream and default is not None and is_same_coalescing(row, default):
        ratio = row.http.whole_cpu_ms / default.http.whole_cpu_ms
        yield Verdict(
            "CPU per stream / default's", f"<= {DEFAULT_SHARE:g}x", f"{ratio:.2f}x", ratio <= DEFAULT_SHARE
        )


def is_same_coalescing(row: Row, other: Row) -> bool:
    """Whether answers came in as many pieces: where a server falls behind, they merge."""
    pieces = sorted((row.http.pieces, other.http.pieces))
    return pieces[1] <= SAME_COALESCING * pieces[0]


def _at_most(name: str, limit_ms: float, measured_ms: float) -> Verdict:
    return Verdict(name, f"<= {limit_ms:.3g} ms", f"{measured_ms:.1f} ms", measured_ms <= limit_ms)
