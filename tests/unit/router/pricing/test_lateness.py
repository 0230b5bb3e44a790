"""What was expected of a replica beside what is seen of it."""

from __future__ import annotations

import pytest

from cache.types import RequestId
from router.pricing.lateness import LATE_S, LATE_TIMES, Lateness
from tests.fakes.router import replica_id

A, B = replica_id(0), replica_id(1)
R, S = RequestId("r"), RequestId("s")


def test_nobody_is_late_within_what_estimates_are_worth() -> None:
    lateness = Lateness()
    lateness.sent(R, A, 0.0, 0.0)
    lateness.sent(S, B, 0.0, 1.0)
    assert lateness.late(LATE_S, 3) == {}
    assert lateness.late(LATE_S + 0.01, 3) == {A: LATE_S + 0.01}
    limit_s = LATE_S + LATE_TIMES * 1.0
    assert lateness.late(limit_s, 3).keys() == {A}
    assert lateness.late(limit_s + 0.5, 3) == {A: limit_s + 0.5, B: limit_s + 0.5 - 1.0}


def test_the_oldest_counts_until_it_has_its_first_token() -> None:
    lateness = Lateness()
    lateness.sent(R, A, 0.0, 0.0)
    lateness.sent(S, A, 4.0, 0.0)
    assert lateness.late(5.0, 2) == {A: 5.0}
    assert lateness.over(R) == A
    assert lateness.late(5.0, 2) == {A: 1.0}
    assert lateness.over(S) == A
    assert lateness.over(S) is None
    assert lateness.late(5.0, 2) == {}


def test_who_took_it_instead_has_as_long_as_the_first_had() -> None:
    lateness = Lateness()
    lateness.sent(R, A, 0.0, 0.0)
    lateness.moved(R, B, 3.0)
    lateness.moved(S, B, 3.0)
    assert lateness.late(4.0, 3) == {B: 1.0}


def test_who_has_gone_is_none_of_all() -> None:
    """Or one that hangs would be taken for as late as all are, while another one that left is later."""
    lateness = Lateness()
    lateness.sent(R, A, 0.0, 0.0)
    lateness.sent(S, B, 2.0, 0.0)
    lateness.gone(A)
    lateness.gone(A)
    assert lateness.late(9.0, 2) == {B: 7.0}
    assert lateness.over(R) is None
    lateness.moved(R, B, 9.0)
    assert lateness.over(S) == B
    assert lateness.late(20.0, 2) == {}


def test_where_all_are_late_it_is_the_estimate_that_was_wrong() -> None:
    lateness = Lateness()
    lateness.sent(R, A, 0.0, 0.0)
    assert lateness.late(9.0, 1) == {}
    lateness.sent(S, B, 2.0, 0.0)
    assert lateness.late(9.0, 2) == {A: 2.0}


def test_who_came_later_and_was_answered_first_went_before_it() -> None:
    """As shorter prompts do: what they took was to be expected. Who ended without a token took nothing."""
    lateness = Lateness()
    lateness.sent(R, A, 0.0, 1.0, 4.0)
    for index in range(3):
        lateness.sent(RequestId(f"short{index}"), A, 1.0, 0.5, 1.0)
    assert lateness.answered(RequestId("short0")) == A
    assert lateness.answered(RequestId("short0")) is None
    assert lateness.over(RequestId("short1")) == A
    limit_s = LATE_S + LATE_TIMES * (1.0 + 1.0)
    assert lateness.late(limit_s, 2) == {}
    assert lateness.late(limit_s + 0.01, 2) == {A: pytest.approx(limit_s + 0.01 - 2.0)}
    assert lateness.answered(R) == A
    assert lateness.late(LATE_S + 2.51, 2) == {A: pytest.approx(LATE_S + 1.01)}, "nobody came after it"
