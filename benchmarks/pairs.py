"""Ours beside another, run by run: how many times as fast, with a 95 % interval, and what that says.

The two of a pair have the same prompts and follow each other at once, each first in turn, so that what slows
the machine down for a while is in both. The logarithm of their ratio is taken per pair, and Student's t says
where its mean lies. Knows durations; knows neither engines nor tables.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.spans import Span
from loadtest.placement.intervals import Interval, paired_ratio


class Finding(enum.StrEnum):
    """What an interval of ours over another's speed says."""

    AT_OR_ABOVE = "at or above"  # all of it
    BELOW = "below"
    CANNOT_TELL = "cannot tell"  # 1 is inside; or there is one pair, which has no interval

    @classmethod
    def of(cls, interval: Interval) -> Finding:
        if interval.low >= 1.0:
            return cls.AT_OR_ABOVE
        return cls.BELOW if interval.high < 1.0 else cls.CANNOT_TELL


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast as the other we are: over 1 is faster."""

    cpu: Interval
    wall: Interval
    num_pairs: int

    @property
    def finding(self) -> Finding:
        """By CPU time: of wall time the neighbours have a part."""
        return Finding.of(self.cpu)

    def to_json(self) -> dict[str, Any]:
        return {"cpu": _told(self.cpu), "wall": _told(self.wall), "num_pairs": self.num_pairs}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Ratio:
        """Inverse of `to_json`. Raises KeyError or TypeError for anything else."""
        return cls(_interval(told["cpu"]), _interval(told["wall"]), told["num_pairs"])


def ratio(ours: Sequence[Span], other: Sequence[Span]) -> Ratio:
    """Paired by position; the longer one's last runs have no partner and do not count. At least one pair."""
    pairs = list(zip(ours, other, strict=False))
    return Ratio(
        cpu=paired_ratio([theirs.cpu_s for _, theirs in pairs], [mine.cpu_s for mine, _ in pairs]),
        wall=paired_ratio([theirs.wall_s for _, theirs in pairs], [mine.wall_s for mine, _ in pairs]),
        num_pairs=len(pairs),
    )


def _told(interval: Interval) -> list[float | None]:
    """Estimate, low, high; null where it is infinitely wide, which JSON has no number for."""
    return [interval.estimate, interval.low, interval.high if math.isfinite(interval.high) else None]


def _interval(told: list[float | None]) -> Interval:
    estimate, low, high = told
    if estimate is None or low is None:
        raise TypeError(f"not an interval: {told}")
    return Interval(estimate, low, math.inf if high is None else high)
