"""Whether another attempt is worth making, by what has failed so far."""

from __future__ import annotations

import pytest

from cache.errors import (
    AdmissionFailed,
    DeadlineExceeded,
    ForwardFailed,
    HandedOver,
    PiecesLost,
    PromptTooLong,
    QueueFull,
    RefusedEverywhere,
    RequestRefused,
)
from router.dispatch.failed_attempts import FailedAttempts
from router.errors import ReplicaLost

LOST = ReplicaLost("it is gone")


def a_count(max_attempts: int = 10, max_deaths: int = 3) -> FailedAttempts:
    return FailedAttempts(max_attempts, max_deaths)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (LOST, "replica_lost"),
        (QueueFull(8, 8), "busy"),
        (HandedOver(), "handed_over"),
        (PiecesLost(), "deltas_lost"),
        (RequestRefused("shutting down"), "replica_lost"),
        (PromptTooLong(9, 8), None),
        (DeadlineExceeded(1.0, 2.0), None),
        (RefusedEverywhere("share: 0 is not above 0"), None),
    ],
)
def test_what_another_replica_would_do_better(error: ReplicaLost | RequestRefused, cause: str | None) -> None:
    assert a_count().add(error, 0) == cause


def test_as_many_as_there_may_be_and_who_leaves_has_not_failed() -> None:
    failed = a_count(max_attempts=2)
    assert [failed.add(HandedOver(), 0) for _ in range(5)] == ["handed_over"] * 5
    assert failed.add(QueueFull(8, 8), 0) == "busy"
    assert failed.add(QueueFull(8, 8), 0) is None


def test_deaths_count_until_a_token_has_come_between_them() -> None:
    failed = a_count()
    assert [failed.add(LOST, tokens) for tokens in (0, 0, 5, 5)] == ["replica_lost"] * 4
    assert failed.add(LOST, 5) is None
    assert (failed.num_deaths, failed.is_suspect) == (5, True)


def test_who_has_gone_on_between_deaths_is_no_suspect_before_its_attempts_are_used_up() -> None:
    """Where nobody else was left it was told so, not to be sent again."""
    failed = a_count(max_attempts=4)
    seen = []
    for tokens in (3, 5, 8, 9):
        failed.add(LOST, tokens)
        seen.append(failed.is_suspect)
    assert seen == [False, False, False, True]


def test_a_forward_fails_twice_wherever_it_is_sent() -> None:
    failed = a_count()
    assert failed.add(ForwardFailed("r"), 0) == "forward_failed"
    assert failed.add(ForwardFailed("r"), 9) is None
    assert not failed.is_suspect


def test_what_nobody_can_take_in_is_tried_on_two() -> None:
    """It was tried on as many as there may be attempts, with the same traceback in each one's log."""
    failed = a_count()
    assert failed.add(AdmissionFailed("AttributeError"), 0) == "admission_failed"
    assert failed.add(AdmissionFailed("AttributeError"), 0) is None
