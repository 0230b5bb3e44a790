"""What is refused beside what is placed, in seconds of replicas' time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.refused_work import MEMORY_S, MOST, RefusedWork

SECONDS = st.floats(0.01, 100.0)


def test_refused_for_each_second_that_was_placed() -> None:
    work = RefusedWork()
    assert work.ratio == 0.0
    work.placed(2.0, 0.0)
    assert work.ratio == 0.0
    work.refused(3.0, 0.0)
    assert work.ratio == pytest.approx(1.5)
    work.placed(4.0, MEMORY_S)  # as (2 + 3) / e seconds ago count
    assert work.ratio == pytest.approx(3.0 / math.e / (2.0 / math.e + 4.0))


def test_what_an_engine_would_not_take_was_not_placed() -> None:
    work = RefusedWork()
    work.placed(3.0, 0.0)
    work.not_taken(1.0, 0.0)
    work.refused(1.0, 0.0)
    assert work.ratio == pytest.approx(0.5)
    work.not_taken(9.0, 0.0)  # ages differ: never less than nothing
    work.placed(1.0, 0.0)
    assert work.ratio == pytest.approx(1.0)


def test_clients_that_come_back_at_once_count_no_more_than_the_most() -> None:
    work = RefusedWork()
    work.refused(1.0, 0.0)
    assert work.ratio == MOST
    work.placed(1.0, 0.0)
    for _ in range(1000):
        work.refused(1.0, 0.0)
    assert work.ratio == MOST


@given(st.lists(st.tuples(SECONDS, st.floats(0.0, 1.0)), min_size=1, max_size=5))
def test_in_the_mean_of_what_they_place_routers_tell_the_ratio_of_all(
    routers: list[tuple[float, float]],
) -> None:
    """However unevenly requests come to them. Each: seconds placed, and refused for each of those."""
    told, every = 0.0, RefusedWork()
    for placed_s, part in routers:
        own = RefusedWork()
        for work in (own, every):
            work.placed(placed_s, 0.0)
            work.refused(part * placed_s, 0.0)
        told += placed_s * own.ratio
    assert told / sum([placed_s for placed_s, _ in routers]) == pytest.approx(every.ratio)


@given(st.floats(0.1, MOST - 0.1), st.integers(1, 20))
def test_a_load_that_stays_the_same_has_one_ratio_however_long_it_lasts(ratio: float, rate: int) -> None:
    work = RefusedWork()
    for step in range(30 * rate):
        work.placed(1.0, step / rate)
        work.refused(ratio, step / rate)
    assert work.ratio == pytest.approx(ratio)
