"""The tables of `python -m benchmarks.cache`. Knows numbers; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.cache.engine import Merged
from benchmarks.cache.pages import Paged
from benchmarks.cache.replay import Replayed
from benchmarks.cache.timed import VERBS

WIDTH = 150


@dataclass(frozen=True, slots=True)
class Row:
    """One discipline on one kind of traffic."""

    traffic: str
    discipline: str
    replayed: Replayed
    twice: float  # of the memory, on average over the steps: holds what is elsewhere in it as well; 0 to 1
    call_us: dict[str, float]  # CPU of the middle call of each verb
    request_us: float  # CPU of all those calls, per request

    @property
    def hit_ratio(self) -> float:
        return self.replayed.hit_tokens / self.replayed.prompt_tokens


def table(rows: Sequence[Row]) -> Table:
    """All rows, those of one traffic together."""
    result = Table(box=SIMPLE_HEAD, show_edge=False)
    result.add_column("traffic")
    result.add_column("discipline")
    numbers = (
        "hit tokens", "of prompts", "beside 1st", "held twice", "TTFT s", *(f"{verb} us" for verb in VERBS),
        "request us",
    )  # fmt: skip
    for title in numbers:
        result.add_column(title, justify="right")
    first: Row | None = None
    for row in rows:
        if first is None or row.traffic != first.traffic:
            first = row
        result.add_row(
            row.traffic,
            row.discipline,
            f"{row.replayed.hit_tokens:,}",
            f"{row.hit_ratio:.2%}",
            f"{row.replayed.hit_tokens - first.replayed.hit_tokens:+,}",
            f"{row.twice:.2%}",
            f"{row.replayed.mean_ttft_s:.3f}",
            *(f"{row.call_us[verb]:.1f}" for verb in VERBS),
            f"{row.request_us:,.0f}",
        )
    return result


def engine_table(merged: Sequence[Merged]) -> Table:
    """One row per batch."""
    result = Table(box=SIMPLE_HEAD, show_edge=False)
    result.add_column("batch")
    for title in (
        "append_only s",
        "merge_on_fill s",
        "ratio",
        "lowest",
        "highest",
        "blocks freed",
        "same output",
    ):
        result.add_column(title, justify="right")
    for row in merged:
        ratios = (f"{ratio:.3f}" for ratio in (row.ratio, *row.ratios))
        times = (f"{row.append_only_s:.2f}", f"{row.merge_on_fill_s:.2f}")
        result.add_row(row.batch, *times, *ratios, str(row.freed_blocks), "yes" if row.same_output else "no")
    return result


def page_table(paged: Sequence[Paged]) -> Table:
    """One row per page size."""
    result = Table(box=SIMPLE_HEAD, show_edge=False)
    for title in ("tokens per page", "metadata ms a step", "gather ms a layer"):
        result.add_column(title, justify="right")
    for row in paged:
        result.add_row(str(row.page_tokens), f"{row.metadata_ms:.2f}", f"{row.gather_ms:.2f}")
    return result
