"""Paired intervals: worked examples, and what they promise."""

from __future__ import annotations

import math
import random

import pytest

from loadtest.placement.intervals import geometric_mean, paired_ratio, paired_ratio_over_cells


def test_a_worked_example() -> None:
    # Logs of the ratios: ln 1.1, ln 1.2, ln 1.3; mean 0.18003, deviation 0.08356, t(2) = 4.303.
    found = paired_ratio([1.1, 2.4, 3.9], [1.0, 2.0, 3.0])
    assert found.estimate == pytest.approx(1.1972, abs=1e-4)
    assert found.low == pytest.approx(0.9728, abs=1e-3)
    assert found.high == pytest.approx(1.4734, abs=1e-3)
    assert not found.is_above_1
    assert not found.is_below_1


def test_pairing_takes_out_what_the_windows_have_in_common() -> None:
    theirs = [1.0, 10.0, 100.0, 1000.0]
    found = paired_ratio([0.9 * value for value in theirs], theirs)
    assert found.is_below_1
    assert found.high == pytest.approx(0.9)


def test_one_run_proves_nothing() -> None:
    found = paired_ratio([5.0], [1.0])
    assert found.estimate == pytest.approx(5.0)
    assert (found.low, found.high) == (0.0, math.inf)
    assert not found.is_above_1
    assert str(found) == "5.000"


def test_over_cells_the_seeds_are_what_varies() -> None:
    # One seed twice as slow in every cell, another twice as fast: nothing follows, however many cells.
    ours = [[2.0, 0.5]] * 50
    found = paired_ratio_over_cells(ours, [[1.0, 1.0]] * 50)
    assert found.estimate == pytest.approx(1.0)
    assert found.low < 0.01 < 100 < found.high


def test_reversing_the_pair_inverts_the_interval() -> None:
    ours, theirs = [1.0, 1.5, 1.2, 1.7], [1.3, 1.4, 1.9, 2.0]
    there, back = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert there.estimate * back.estimate == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0)


@pytest.mark.parametrize(("runs", "t"), [(31, 2.042), (32, 2.040), (41, 2.021), (121, 1.980)])
def test_many_runs_have_students_quantile_too(runs: int, t: float) -> None:
    """No narrower than it is for a run more than the table has."""
    logs = [(-1.0) ** n for n in range(runs)]
    mean = sum(logs) / runs
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / (runs - 1))
    found = paired_ratio([math.exp(each) for each in logs], [1.0] * runs)
    assert math.log(found.high) - mean == pytest.approx(t * deviation / math.sqrt(runs), rel=0.003)


@pytest.mark.parametrize("seeds", [2, 5, 40])
def test_covers_the_truth_19_times_in_20(seeds: int) -> None:
    rng = random.Random(seeds)
    truth, covered, trials = 1.25, 0, 2000
    for _ in range(trials):
        theirs = [math.exp(rng.gauss(0.0, 1.0)) for _ in range(seeds)]
        ours = [value * truth * math.exp(rng.gauss(0.0, 0.2)) for value in theirs]
        found = paired_ratio(ours, theirs)
        covered += found.low <= truth <= found.high
    assert covered / trials == pytest.approx(0.95, abs=0.02)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
