"""The latest numbers' quantile: what so many of them do not exceed, and nothing of those before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing.recent_quantile import RecentQuantile


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 5.0), (0.95, 10.0), (1.0, 10.0)])
def test_worked_examples(share: float, expected: float) -> None:
    quantile = RecentQuantile(share, over=10)
    for value in (99.0, 98.0, 3.0, 1.0, 2.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0):
        quantile.add(value)
    assert quantile.value == expected
    assert len(quantile) == 10


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=60), st.integers(1, 40), st.floats(0.0, 1.0))
def test_it_is_that_of_a_sorted_copy(values: list[float], over: int, share: float) -> None:
    quantile = RecentQuantile(share, over)
    for number, value in enumerate(values, start=1):
        quantile.add(value)
        latest = values[max(0, number - over) : number]
        assert quantile.value in latest
        assert sum(each <= quantile.value for each in latest) >= share * len(latest)
        assert sum(each < quantile.value for each in latest) < max(1e-9, share * len(latest)) or share == 0.0
