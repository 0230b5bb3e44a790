"""How seconds are distributed, in memory that does not grow with their number.

Buckets are 1 % wide: every quantile is within half a percent of the truth, from a microsecond up. Two
histograms add up, which is how repeats are put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

_GROWTH = math.log(1.01)
_LEAST_S = 1e-6  # shorter counts as this


@dataclass(slots=True)
class Histogram:
    """Mutable; owned by whoever counts."""

    buckets: dict[int, int] = field(default_factory=dict)  # bucket: how many
    total_s: float = 0.0
    largest_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Negative ones count as 0."""
        bucket = math.floor(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _GROWTH)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.total_s += max(0.0, seconds)
        self.largest_s = max(self.largest_s, seconds)

    def merge(self, other: Histogram) -> None:
        for bucket, number in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + number
        self.total_s += other.total_s
        self.largest_s = max(self.largest_s, other.largest_s)

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    @property
    def mean_s(self) -> float:
        """NaN for none."""
        return self.total_s / self.count if self.buckets else math.nan

    def quantile_s(self, share: float) -> float:
        """The value that `share` (0..1) of all do not exceed; NaN for none. O(buckets)."""
        wanted = max(1, math.ceil(share * self.count))
        for seconds, cumulative in self._cumulative():
            if cumulative >= wanted:
                return min(seconds, self.largest_s)
        return math.nan

    def curve(self) -> list[tuple[float, float]]:
        """(seconds, share of all that take no longer), ascending: an empirical distribution function."""
        count = self.count
        return [(seconds, cumulative / count) for seconds, cumulative in self._cumulative()]

    def _cumulative(self) -> Iterator[tuple[float, int]]:
        cumulative = 0
        for bucket in sorted(self.buckets):
            cumulative += self.buckets[bucket]
            yield _LEAST_S * math.exp((bucket + 0.5) * _GROWTH), cumulative
