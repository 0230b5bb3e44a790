"""When a replica's steps end, for who is sent there now: steps of 10 ms, ways of 4 ms."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing.step_clock import OVER, UNKNOWN, StepClock

STEP_S, WAY_S = 0.010, 0.004
NOW = 100.0


def measured() -> StepClock:
    """One whose way was measured; a step began when `NOW` was heard."""
    clock = StepClock()
    clock.arrived(WAY_S)
    clock.begins(STEP_S, STEP_S, NOW)
    return clock


def test_nothing_is_known_before_a_way_was_measured() -> None:
    clock = StepClock()
    clock.begins(STEP_S, STEP_S, NOW)
    assert clock.boundary_at == UNKNOWN


def test_the_next_step_takes_who_was_sent_a_way_before_it_begins() -> None:
    assert measured().boundary_at == pytest.approx(NOW + STEP_S - WAY_S)


def test_a_step_that_computes_prompts_is_as_long_as_that_takes() -> None:
    clock = measured()
    clock.begins(0.3, STEP_S, NOW + STEP_S)
    assert clock.boundary_at == pytest.approx(NOW + STEP_S + 0.3 - WAY_S)


def test_who_rests_has_no_steps() -> None:
    clock = measured()
    clock.begins(0.0, 0.0, NOW + STEP_S)
    assert clock.boundary_at == UNKNOWN


def test_the_way_is_as_long_as_most_are() -> None:
    clock = StepClock()
    for way_s in (0.001, 0.002, 0.003, 5.0):
        clock.arrived(way_s)
    clock.begins(STEP_S, STEP_S, NOW)
    assert clock.boundary_at == pytest.approx(NOW + STEP_S - 0.003)


def test_what_engines_do_between_steps_is_learnt() -> None:
    """Steps begin every 13 ms, of which the fit knows 10; told of are each, some twice, or every third."""
    clock, now = measured(), NOW
    for number in range(20 * OVER):
        now += 0.013 * (1 if number % 3 else 3)
        clock.begins(STEP_S, STEP_S, now)
        clock.begins(STEP_S, STEP_S, now + 0.0005)
    assert clock.pace == pytest.approx(1.3, rel=0.05)
    clock.begins(STEP_S, STEP_S, now + 0.013)
    assert clock.boundary_at == pytest.approx(now + 0.026 - WAY_S, abs=0.001)


def test_a_rest_is_no_step() -> None:
    clock = measured()
    for number in range(10 * OVER):
        clock.begins(0.0, 0.0, NOW + 2 * number)
        clock.begins(STEP_S, STEP_S, NOW + 2 * number + 1.4 * STEP_S)
    assert clock.pace == 1.0


@given(st.integers(0, 2**32), st.floats(0.7, 1.4))
def test_uneven_steps_make_the_pace_their_mean_s(seed: int, mean: float) -> None:
    clock, draw, now = measured(), random.Random(seed), NOW
    for _ in range(20 * OVER):
        now += STEP_S * mean * draw.uniform(0.9, 1.1)
        clock.begins(STEP_S, STEP_S, now)
    assert clock.pace == pytest.approx(mean, rel=0.1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("way"), st.floats(0, 10), st.just(0.0)),
            st.tuples(st.just("step"), st.floats(0, 10), st.floats(0, 10)),
        )
    )
)
def test_whatever_comes_a_boundary_is_a_time_or_unknown(heard: list[tuple[str, float, float]]) -> None:
    clock, now = StepClock(), NOW
    for kind, first_s, step_s in heard:
        now += first_s
        if kind == "way":
            clock.arrived(first_s)
        else:
            clock.begins(first_s, step_s, now)
        assert clock.boundary_at == UNKNOWN or (math.isfinite(clock.boundary_at) and first_s > 0)
        assert 0 < clock.pace < math.inf
