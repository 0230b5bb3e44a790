"""When who was found slow gets another request."""

from __future__ import annotations

from router.pricing.trial import AFTER_S, MOST_AFTER_S, Trial


def opens_after_s(trial: Trial, begin_s: float) -> float:
    """Seconds of idleness until it is open, to a half."""
    now = begin_s
    trial.idle(now)
    while not trial.is_open:
        now += 0.5
        trial.idle(now)
    return now - begin_s


def test_it_opens_after_some_seconds_without_work_and_ends_with_the_first_of_it() -> None:
    trial = Trial()
    assert opens_after_s(trial, 0.0) == AFTER_S
    trial.busy()
    assert not trial.is_open


def test_work_in_between_begins_the_time_anew() -> None:
    trial = Trial()
    trial.idle(0.0)
    trial.idle(AFTER_S - 0.5)
    trial.busy()
    trial.idle(AFTER_S)
    assert not trial.is_open


def test_each_trial_puts_the_next_one_off() -> None:
    trial, waits, now = Trial(), [], 0.0
    for _ in range(7):
        waits.append(opens_after_s(trial, now))
        trial.busy()
        trial.busy()
        now += 1000.0
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]
    assert waits[-1] == MOST_AFTER_S
