"""Virtual time jumps from event to event, in order."""

from __future__ import annotations

from loadtest.simulation.clock import EventQueue


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
