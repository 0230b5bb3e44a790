"""Virtual time jumps from event to event, in order."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.simulation.clock import EventQueue, first_from
from loadtest.simulation.engine import HEARTBEAT_S


def test_events_happen_in_order_of_time_then_of_making() -> None:
    queue, seen = EventQueue(), list[tuple[float, str]]()
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        queue.at(time_s, lambda name: seen.append((queue.now, name)), name)
    while queue.step():
        pass
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert queue.num_events == 3
    assert queue() == 2.0


def test_what_is_due_in_the_past_happens_now_and_after_what_is_due() -> None:
    queue, seen = EventQueue(), list[str]()

    def first() -> None:
        seen.append("first")
        queue.at(0.5, seen.append, "late")

    queue.at(1.0, first)
    queue.at(1.0, seen.append, "second")
    while queue.step():
        pass
    assert seen == ["first", "second", "late"]
    assert queue.now == 1.0


@given(st.floats(0.0, 5_000.0), st.floats(0.0, 5_000.0))
@example(0.1, 5_000.0)
@example(1e-300, 4.0)
@example(0.0, 0.5)
@example(1023.9999999999999, 1024.0)
def test_heartbeats_that_are_left_out_are_as_if_added_one_by_one(start_s: float, gap_s: float) -> None:
    until_s = start_s + gap_s
    time_s = start_s
    while time_s < until_s:
        time_s += HEARTBEAT_S
    assert first_from(start_s, HEARTBEAT_S, until_s) == time_s


def test_a_gap_of_half_a_century_takes_no_time() -> None:
    """Each heartbeat of it was added, for each replica: minutes."""
    assert first_from(0.1, HEARTBEAT_S, 1.7e9) == pytest.approx(1.7e9, abs=HEARTBEAT_S)
