"""Ratios by pair, with worked examples, and what they say."""

from __future__ import annotations

import math

import pytest

from benchmarks.pairs import Finding, Ratio, ratio
from benchmarks.spans import Span
from loadtest.placement.intervals import Interval


def _spans(*cpu_s: float) -> list[Span]:
    return [Span(2 * each, each) for each in cpu_s]


def test_the_geometric_mean_and_its_interval_by_hand() -> None:
    """Ratios 1.1, 1.2, 1.1 * 1.1 * ...: logarithms with mean m and deviation s; t of two degrees is 4.303."""
    found = ratio(_spans(1.0, 2.0, 1.0), _spans(1.1, 2.4, 1.3))
    logs = [math.log(each) for each in (1.1, 1.2, 1.3)]
    mean = sum(logs) / 3
    margin = 4.303 * math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    assert found.cpu.estimate == pytest.approx(math.exp(mean))
    assert (found.cpu.low, found.cpu.high) == pytest.approx(
        (math.exp(mean - margin), math.exp(mean + margin))
    )
    assert found.wall.estimate == pytest.approx(found.cpu.estimate), "twice as long on both sides"
    assert found.num_pairs == 3


def test_runs_without_a_partner_do_not_count() -> None:
    found = ratio(_spans(1.0, 1.0, 7.0), _spans(2.0, 2.0))
    assert (found.cpu.estimate, found.num_pairs) == (pytest.approx(2.0), 2)


@pytest.mark.parametrize(
    ("low", "high", "finding"),
    [
        (1.0, 1.2, Finding.AT_OR_ABOVE),
        (0.999, 1.2, Finding.CANNOT_TELL),
        (0.8, 1.0, Finding.CANNOT_TELL),
        (0.8, 0.99, Finding.BELOW),
        (0.0, math.inf, Finding.CANNOT_TELL),
    ],
)
def test_an_interval_says_something_where_1_is_not_inside(low: float, high: float, finding: Finding) -> None:
    told = Ratio(Interval(1.0, low, high), Interval(5.0, 4.0, 6.0), 3)
    assert told.finding is finding


def test_one_pair_has_no_interval_and_comes_back_from_json_without() -> None:
    found = ratio(_spans(1.0), _spans(3.0))
    assert found.finding is Finding.CANNOT_TELL
    assert found.to_json()["cpu"][2] is None
    assert Ratio.from_json(found.to_json()) == found
