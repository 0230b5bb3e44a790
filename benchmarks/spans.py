"""Durations on two clocks, and the few statistics the benchmarks use. Pure; knows no engine.

Wall time is what a user waits; CPU time is what the work costs. With one torch thread on an idle machine
they agree; on a shared one wall time also counts the neighbours, so conclusions are drawn from CPU time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Span:
    """One duration, seconds. `cpu_s` is of the whole process, all its threads."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Span) -> Span:
        return Span(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Span) -> Span:
        return Span(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)

    def scaled(self, factor: float) -> Span:
        return Span(self.wall_s * factor, self.cpu_s * factor)


NO_TIME = Span(0.0, 0.0)


def now() -> Span:
    """Both clocks; only differences mean anything."""
    return Span(time.perf_counter(), time.process_time())


def total(spans: Iterable[Span]) -> Span:
    return sum(spans, NO_TIME)


def gaps(stamps: Sequence[Span]) -> tuple[Span, ...]:
    """Durations between neighbouring stamps, one fewer than stamps."""
    return tuple(after - before for before, after in itertools.pairwise(stamps))


def median_span(spans: Sequence[Span]) -> Span:
    """Median of each clock by itself. Raises StatisticsError when there are none."""
    return Span(median(span.wall_s for span in spans), median(span.cpu_s for span in spans))


def rate(count: float, span: Span) -> Span:
    """`count` per second on each clock. (A Span by shape: a pair of wall and CPU values.)"""
    return Span(count / span.wall_s, count / span.cpu_s)
