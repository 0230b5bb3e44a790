"""How far a grid is, on the terminal: cells, time left, and what the finished ones say so far.

A `GridObserver`, which keeps every cell's figures. Knows rich; knows nothing of how cells run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape

from cache.counted import counted
from loadtest.placement.errors import UnreadableResult
from loadtest.placement.grid import describe
from loadtest.placement.policy_choice import DEFAULT, PolicyChoice
from loadtest.placement.summary import CellSummary, summarize
from loadtest.progress_bar import bar_with_time_left
from loadtest.simulation.cell import IDEAL, CellResult, CellSpec


class GridProgress:
    """Context manager: the bar is there inside it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = bar_with_time_left(console)
        self._estimate = RunningEstimate()
        self.summaries: dict[CellSpec, CellSummary] = {}  # of all that have a result

    def __enter__(self) -> Self:
        self._bar.start()
        self._task = self._bar.add_task("cells", total=None, told="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def kept(self, spec: CellSpec, result: CellResult) -> None:
        self._add(spec, result)

    def unreadable(self, error: UnreadableResult) -> None:
        self._console.print(f"[yellow]warning:[/] {escape(str(error))}", highlight=False, soft_wrap=True)

    def started(self, num_cells: int, num_kept: int) -> None:
        if num_kept:
            self._console.print(f"{num_kept} of {counted(num_cells, 'cell')} finished already.")
        # Kept cells count as done from the start: they would make the time left look short.
        self._bar.reset(self._task, total=num_cells, completed=num_kept)
        self._bar.update(self._task, told=str(self._estimate))

    def finished(self, spec: CellSpec, result: CellResult) -> None:
        self._add(spec, result)
        self._bar.update(self._task, advance=1, told=str(self._estimate))

    def failed(self, spec: CellSpec, error: str) -> None:
        self._bar.update(self._task, advance=1)
        self._console.print(
            f"[red]failed:[/] {escape(f'{describe(spec)}: {error.strip().splitlines()[-1]}')}",
            highlight=False,
        )

    def stopping(self, num_running: int) -> None:
        self._console.print(
            f"Waiting for {counted(num_running, 'cell')} under way; Ctrl-C again drops what is."
        )

    def _add(self, spec: CellSpec, result: CellResult) -> None:
        summary = self.summaries[spec] = summarize(result, spec.num_replicas)
        self._estimate.add(spec, summary.mean_ttft_s)


class RunningEstimate:
    """The default policy over the ideal, over the windows for which both have finished."""

    def __init__(self) -> None:
        self._waiting: dict[CellSpec, dict[str, float]] = defaultdict(dict)
        self._sum_of_logs = 0.0
        self._count = 0

    def add(self, spec: CellSpec, mean_ttft_s: float) -> None:
        if spec.policy not in (DEFAULT, IDEAL) or spec.policy_options or spec.num_routers > 1:
            return
        if spec.router_options not in ((), PolicyChoice(DEFAULT).router_settings):
            return
        window = replace(spec, policy=IDEAL, router_options=())
        pair = self._waiting[window]
        pair[spec.policy] = mean_ttft_s
        if len(pair) == 2:
            self._sum_of_logs += math.log(pair[DEFAULT] / pair[IDEAL])
            self._count += 1

    def __str__(self) -> str:
        if not self._count:
            return ""
        return f"{DEFAULT} so far {math.exp(self._sum_of_logs / self._count):.3f}x the ideal"
