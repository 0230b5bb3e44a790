"""Durations and the statistics of the benchmarks."""

from __future__ import annotations

from statistics import StatisticsError

import pytest

from benchmarks.spans import Span, gaps, median_span, now, rate, total


def test_arithmetic_keeps_the_clocks_apart() -> None:
    assert Span(3, 2) - Span(1, 0.5) == Span(2, 1.5)
    assert Span(3, 2).scaled(10) == Span(30, 20)
    assert total([Span(1, 2), Span(3, 4)]) == Span(4, 6)
    assert total([]) == Span(0, 0)


def test_gaps_are_one_fewer_than_stamps() -> None:
    assert gaps([Span(1, 1), Span(3, 2), Span(6, 4)]) == (Span(2, 1), Span(3, 2))
    assert gaps([Span(1, 1)]) == ()
    assert gaps([]) == ()


def test_the_median_is_taken_on_each_clock() -> None:
    assert median_span([Span(1, 30), Span(2, 10), Span(90, 20)]) == Span(2, 20)
    with pytest.raises(StatisticsError):
        median_span([])


def test_rate_counts_per_second() -> None:
    assert rate(100, Span(4, 2)) == Span(25, 50)


def test_now_moves_forward_on_both_clocks() -> None:
    before = now()
    while (after := now()).cpu_s == before.cpu_s:
        pass
    assert after.wall_s > before.wall_s
