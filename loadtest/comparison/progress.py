"""How far a comparison is, on the terminal: what runs, how long it may still take, what it says so far."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from rich.console import Console

from cache.counted import counted
from loadtest.comparison.experiment import Observer
from loadtest.comparison.load import Look
from loadtest.comparison.plan import Cell, Plan
from loadtest.comparison.results import Found, Run
from loadtest.open_loop.tally import Tally
from loadtest.progress_bar import bar_with_time_left

_START_S = 25.0  # to start and to stop a deployment, about
_RATES = 6  # that a search tries, about: half as high as the first, and half of them missed


class ComparisonProgress(Observer):
    """Context manager: the bars are there inside it."""

    def __init__(self, console: Console, plan: Plan | None = None) -> None:
        """plan: None where one run is all there is."""
        self._console = console
        self._bar = bar_with_time_left(console, is_transient=True)
        self._plan = plan

    def __enter__(self) -> Self:
        self._bar.start()
        if self._plan is not None:
            self._whole = self._bar.add_task("all of it, s", total=round(expected_s(self._plan)), told="")
        self._one = self._bar.add_task("starting", total=None, told="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def starting(self, contender: str, repeat: int) -> None:
        self._bar.reset(
            self._one, total=None, description=f"repeat {repeat + 1}: {contender} starts", told=""
        )
        self._advance(_START_S)

    def running(self, contender: str, cell: Cell, num_counted: int) -> Look:
        what = f"{contender}, {cell.workload.label} at {cell.rate_per_s:.3g}/s"
        self._bar.reset(self._one, total=cell.num_requests, description=what, told="")

        def look(tally: Tally, num_sent: int, in_flight: int) -> None:
            self._bar.update(self._one, completed=num_sent, told=so_far(tally, in_flight))

        return look

    def finished(self, run: Run) -> None:
        self._advance(run.tally.counted_s)
        self._console.print(
            f"{run.contender}, {run.workload} at {run.rate_per_s:.3g}/s, repeat {run.repeat + 1}: "
            f"{so_far(run.tally, 0)}{'' if run.is_whole else ' (given up: it cannot keep its targets)'}",
            soft_wrap=True,
            markup=False,
        )

    def found(self, found: Found) -> None:
        self._console.print(
            f"{found.contender}, {found.workload}: highest good rate {found.rate_per_s:.3g}/s",
            soft_wrap=True,
            markup=False,
        )

    def _advance(self, seconds: float) -> None:
        if self._plan is not None:
            self._bar.update(self._whole, advance=round(seconds))


def expected_s(plan: Plan) -> float:
    """About; searches take as many tries as they take."""
    cells = sum(cell.num_requests / cell.rate_per_s for cell in plan.cells)
    searches = sum(
        _RATES * (1 + search.attempts) / 2 * search.cell(search.first_per_s / 2).seconds
        for search in plan.searches
    )
    return plan.repeats * len(plan.contenders) * (_START_S + cells + searches)


def in_words(seconds: float) -> str:
    """Seconds, or minutes where these are two or more."""
    return counted(round(seconds), "second") if seconds < 90 else f"{seconds / 60:.0f} minutes"


def so_far(tally: Tally, in_flight: int) -> str:
    parts = [counted(tally.answers, "answer")]
    if tally.answers:
        parts.append(f"TTFT p50 {_ms(tally.ttft.quantile_s(0.5))}, p99 {_ms(tally.ttft.quantile_s(0.99))}")
        if tally.hit_ratio is not None:
            parts.append(f"hits {100 * tally.hit_ratio:.0f} %")
    late_s = tally.late.quantile_s(0.99)
    if not math.isnan(late_s):
        parts.append(f"late {_ms(late_s)}")
    if in_flight:
        parts.append(f"{in_flight} on their way")
    if tally.failures:
        parts.append(", ".join(f"{number} {kind}" for kind, number in tally.failures.items()))
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
