"""What the runs say, with 95 % intervals over repeats. Knows numbers; knows neither servers nor pages.

A repeat has its own seed and its own server; contenders of one repeat were asked the same, so ratios are
paired by repeat. One repeat alone has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.comparison.results import Results, Run
from loadtest.open_loop.tally import Tally
from loadtest.placement.intervals import Interval, paired_ratio


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run. more_is_better tells what a ratio above 1 means."""

    title: str
    of: Callable[[Tally], float]
    more_is_better: bool = False


MEASURES = {
    "ttft_mean": Measure("mean TTFT", lambda tally: tally.ttft.mean_s),
    "ttft_p50": Measure("p50 TTFT", lambda tally: tally.ttft.quantile_s(0.50)),
    "ttft_p99": Measure("p99 TTFT", lambda tally: tally.ttft.quantile_s(0.99)),
    "gap_p50": Measure("p50 ITL", lambda tally: tally.gaps.quantile_s(0.50)),
    "gap_p99": Measure("p99 ITL", lambda tally: tally.gaps.quantile_s(0.99)),
    "hit_ratio": Measure("hit rate", lambda tally: _or_nan(tally.hit_ratio), more_is_better=True),
    "goodput": Measure("goodput", lambda tally: tally.goodput_per_s, more_is_better=True),
    "imbalance": Measure("imbalance", lambda tally: _or_nan(tally.imbalance)),
}


def estimate(runs: Sequence[Run], measure: Measure) -> Interval | None:
    """Geometric mean over repeats; None without a value."""
    values = [measure.of(run.tally) for run in runs]
    return geometric(values)


def geometric(values: Sequence[float]) -> Interval | None:
    """With an interval if all values are above 0; one that is not makes it 0, NaN none."""
    if not values or any(math.isnan(value) for value in values):
        return None
    if any(value <= 0 for value in values):
        return Interval(0.0, 0.0, math.inf)
    return paired_ratio(values, [1.0] * len(values))


def ratio(ours: Sequence[Run], theirs: Sequence[Run], measure: Measure) -> Interval | None:
    """ours / theirs over the repeats that both have; None where they have none, or nothing to divide."""
    by_repeat = {run.repeat: run for run in theirs}
    pairs = [
        (measure.of(run.tally), measure.of(by_repeat[run.repeat].tally))
        for run in ours
        if run.repeat in by_repeat
    ]
    return _paired(pairs)


def found_ratio(results: Results, ours: str, theirs: str, workload: str) -> Interval | None:
    """Highest good rates, ours / theirs."""
    rates = {
        (found.contender, found.repeat): found.rate_per_s
        for found in results.found
        if found.workload == workload
    }
    pairs = [
        (rate, rates[theirs, repeat])
        for (contender, repeat), rate in rates.items()
        if contender == ours and (theirs, repeat) in rates
    ]
    return _paired(pairs)


def found_rate(results: Results, contender: str, workload: str) -> Interval | None:
    return geometric(
        [
            found.rate_per_s
            for found in results.found
            if (found.contender, found.workload) == (contender, workload)
        ]
    )


def _or_nan(value: float | None) -> float:
    """What the server did not tell is no 0."""
    return math.nan if value is None else value


def _paired(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    if not pairs or any(not (a > 0 and b > 0) for a, b in pairs):  # NaN is not above 0 either
        return None
    return paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
