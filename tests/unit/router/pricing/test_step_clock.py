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


def proven(way_s: float = WAY_S) -> StepClock:
    """One whose boundaries came as expected for a while; a step began when `NOW` was heard."""
    clock = StepClock()
    clock.arrived(way_s)
    for number in range(4 * OVER, -1, -1):
        clock.begins(STEP_S, STEP_S, NOW - number * STEP_S)
    return clock


def test_nothing_is_known_before_a_way_was_measured() -> None:
    clock = StepClock()
    for number in range(4 * OVER):
        clock.begins(STEP_S, STEP_S, NOW + number * STEP_S)
    assert clock.boundary_at == UNKNOWN


def test_nothing_is_known_before_it_has_proved_itself() -> None:
    clock = StepClock()
    clock.arrived(WAY_S)
    clock.begins(STEP_S, STEP_S, NOW)
    clock.begins(STEP_S, STEP_S, NOW + STEP_S)
    assert clock.boundary_at == UNKNOWN


def test_the_next_step_takes_who_was_sent_a_way_before_it_begins() -> None:
    assert proven().boundary_at == pytest.approx(NOW + STEP_S - WAY_S)


def test_a_step_that_computes_prompts_is_as_long_as_that_takes() -> None:
    clock = proven()
    clock.begins(0.3, STEP_S, NOW + STEP_S)
    assert clock.boundary_at == pytest.approx(NOW + STEP_S + 0.3 - WAY_S)


def test_batches_between_which_there_were_many_steps_prove_it_too() -> None:
    clock = StepClock()
    clock.arrived(WAY_S)
    for number in range(4 * OVER):
        clock.begins(STEP_S, STEP_S, NOW + 7 * number * STEP_S)
    assert clock.boundary_at != UNKNOWN


def test_who_rests_has_no_steps() -> None:
    clock = proven()
    clock.begins(0.0, 0.0, NOW + STEP_S)
    assert clock.boundary_at == UNKNOWN


def test_steps_of_uneven_length_are_not_gone_by() -> None:
    clock, draw, now = proven(), random.Random(1), NOW
    for _ in range(4 * OVER):
        now += STEP_S * draw.uniform(3.0, 6.0)
        clock.begins(STEP_S, STEP_S, now)
    assert clock.boundary_at == UNKNOWN


def test_ways_of_uneven_length_are_not_gone_by() -> None:
    clock, draw = proven(), random.Random(1)
    for _ in range(4 * OVER):
        clock.arrived(draw.uniform(0.0, 2 * STEP_S))
    clock.begins(STEP_S, STEP_S, NOW + STEP_S)
    assert clock.boundary_at == UNKNOWN


def test_one_way_that_took_long_changes_little() -> None:
    clock = proven()
    for _ in range(OVER):
        clock.arrived(WAY_S)
    clock.arrived(5 * STEP_S)
    clock.begins(STEP_S, STEP_S, NOW + STEP_S)
    assert clock.boundary_at == pytest.approx(NOW + 2 * STEP_S - WAY_S)


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
        assert clock.boundary_at == UNKNOWN or math.isfinite(clock.boundary_at)
        assert clock.boundary_at == UNKNOWN or first_s > 0
