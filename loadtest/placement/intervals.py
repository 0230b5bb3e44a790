"""How sure a comparison is: ratios of paired runs with 95 % intervals.

Two policies meet the same windows, one per seed; the logarithm of their ratio is taken per seed, and
Student's t says where its mean lies. A mean over cells is taken per seed first: cells of one seed are not
independent, seeds of a generator are, and those of a trace as far as it is long enough for their windows
(docs/benchmarks/placement.md). Knows numbers; knows neither cells nor policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom. Beyond, the normal's with the first term
# by which t differs (Abramowitz and Stegun 26.7.5) is within 0.2 %, and without that term 4 % too narrow.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval, which is infinitely wide for a single run."""

    estimate: float
    low: float
    high: float

    @property
    def is_above_1(self) -> bool:
        """The whole interval."""
        return self.low > 1.0

    @property
    def is_below_1(self) -> bool:
        return self.high < 1.0

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.estimate:.3f}"
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Geometric mean of ours/theirs; the two are paired by position. All values above 0."""
    return _exponential([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])


def paired_ratio_over_cells(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Interval:
    """Geometric mean over cells and seeds; both are cells of seeds, and all cells have the same seeds."""
    logs = [
        [math.log(a / b) for a, b in zip(our_cell, their_cell, strict=True)]
        for our_cell, their_cell in zip(ours, theirs, strict=True)
    ]
    return _exponential([sum(of_seed) / len(of_seed) for of_seed in zip(*logs, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """At least one value, all above 0."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _exponential(logs: Sequence[float]) -> Interval:
    mean = sum(logs) / len(logs)
    margin = _margin(logs, mean)
    return Interval(math.exp(mean), math.exp(mean - margin), _exp(mean + margin))


def _margin(values: Sequence[float], mean: float) -> float:
    freedom = len(values) - 1
    if not freedom:
        return math.inf
    variance = sum((value - mean) ** 2 for value in values) / freedom
    t = _T[freedom - 1] if freedom <= len(_T) else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    return t * math.sqrt(variance / len(values))


def _exp(value: float) -> float:
    return math.inf if math.isinf(value) else math.exp(value)
