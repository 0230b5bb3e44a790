"""The least count is the least of all, whatever the upper limit, and is found with few tries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.placement.fewest import LUCK, TRIED_ONE_BY_ONE, fewest


class Values:
    """By count, from 1; how many were asked for."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.asked: set[int] = set()

    def __call__(self, count: int) -> float:
        self.asked.add(count)
        return self.values[count - 1]


def least(values: Sequence[float], limit: float) -> int | None:
    return next((count for count, value in enumerate(values, start=1) if value <= limit), None)


# p99 of the conversation excerpt, 700 requests, 0.4 M tokens of cache each.
EXCERPT_S = (530.165, 147.345, 28.771, 7.914, 7.315, 7.305, 7.324, 7.333, 7.305, 7.333, 7.305, 7.305)


@pytest.mark.parametrize("most", [6, 7, 10, 12])
def test_an_upper_limit_does_not_change_the_answer(most: int) -> None:
    """It was 6 with at most 6, and 11 without: 8 are not enough, so that 5 to 7 were not tried."""
    assert fewest(Values(EXCERPT_S), 7.31, most) == 6


def test_what_luck_never_lets_through_is_not_found() -> None:
    assert fewest(Values(EXCERPT_S), 7.3, 12) is None


@st.composite
def lucky(draw: st.DrawFn, max_size: int) -> tuple[list[float], float]:
    """What falls, and luck on top of it; and a limit near one of the values."""
    falling = sorted(draw(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=max_size)), reverse=True)
    luck = draw(st.lists(st.floats(1.0, 1.0 + LUCK * 0.99), min_size=len(falling), max_size=len(falling)))
    values = [value * by for value, by in zip(falling, luck, strict=True)]
    return values, draw(st.sampled_from(values)) * draw(st.sampled_from((0.999, 1.0, 1.1)))


@given(lucky(TRIED_ONE_BY_ONE))
def test_it_is_the_least_of_all(case: tuple[list[float], float]) -> None:
    values, limit = case
    expected = least(values, limit)
    for most in range(1, len(values) + 1):
        found = fewest(Values(values), limit, most)
        assert found == (expected if expected is not None and expected <= most else None)


@given(lucky(200))
def test_what_is_found_keeps_the_limit_and_took_few_tries(case: tuple[list[float], float]) -> None:
    values, limit = case
    asked = Values(values)
    found = fewest(asked, limit, len(values))
    assert found is None or values[found - 1] <= limit
    assert len(asked.asked) <= 4 * (1 + math.ceil(math.log2(len(values) + 1))) + TRIED_ONE_BY_ONE


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=300).map(lambda values: sorted(values)[::-1]),
    st.floats(0.0, 100.0),
)
def test_without_luck_it_is_the_least_of_any_number(values: list[float], limit: float) -> None:
    asked = Values(values)
    assert fewest(asked, limit, len(values)) == least(values, limit)


@given(st.integers(2, 1_000_000))
def test_those_far_over_the_limit_are_skipped(needed: int) -> None:
    """Work waits at fewer, and the wait falls fast: not all of them are tried."""
    asked: set[int] = set()

    def value(count: int) -> float:
        asked.add(count)
        return 1.0 if count >= needed else 100.0 * needed / count

    assert fewest(value, 1.0, 1_000_000) == needed
    assert len(asked) <= 2 * math.ceil(math.log2(needed)) + 1
