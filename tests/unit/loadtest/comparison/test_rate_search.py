"""The search ends at the highest rate a server can take, to the precision asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.comparison.rate_search import RateSearch


def run(search: RateSearch, capacity: float) -> list[float]:
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.tell(rate, is_met=rate <= capacity)
    return tried


@given(st.floats(0.5, 50), st.floats(0.5, 50))
def test_it_closes_in_from_wherever_it_begins(capacity: float, first: float) -> None:
    search = RateSearch(first, precision=0.05, max_tries=40)
    run(search, capacity)
    if capacity >= first / 64:
        assert search.found_per_s <= capacity <= search.found_per_s * 1.05 * 1.0001


@pytest.mark.parametrize("times", [1 / 60, 1 / 30, 40.0, 56.0, 86.0, 1_000.0])
def test_a_first_guess_far_off_costs_no_precision(times: float) -> None:
    """Or of two servers the better one would be found the worse, as its search ran out of tries."""
    search = RateSearch(4.0)
    run(search, 4.0 * times)
    assert search.found_per_s <= 4.0 * times <= search.found_per_s * 1.08 * 1.0001


def test_a_precision_that_no_number_has_ends_all_the_same() -> None:
    search = RateSearch(4.0, precision=1e-300)
    assert len(run(search, 5.0)) < 100
    assert search.found_per_s == pytest.approx(5.0)


def test_a_server_that_meets_nothing_ends_the_search() -> None:
    search = RateSearch(10.0, max_tries=100)
    assert run(search, 0.0)[-1] > 10.0 / 64 / 1.5
    assert search.found_per_s == 0.0


def test_tries_are_bounded() -> None:
    search = RateSearch(1.0, max_tries=5)
    assert len(run(search, 1e9)) == 5


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_contradictions_do_not_make_it_go_round_for_ever(verdicts: list[bool]) -> None:
    """Noise may have a lower rate fail after a higher one was met."""
    search = RateSearch(4.0, max_tries=30)
    for is_met in verdicts:
        rate = search.next_rate()
        if rate is None:
            break
        assert rate > 0
        search.tell(rate, is_met=is_met)
    assert search.found_per_s >= 0
