"""What one key may still take at a Router, and how durations are written."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidField, RateLimitExceeded
from router.tenants.allowance import OPEN_VISIT, Allowance, duration
from router.tenants.key_table import KeyLimits


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (1.2, "2s"),
        (59.5, "1m0s"),
        (360.0, "6m0s"),
        (3661.0, "1h1m1s"),
        (7200.0, "2h0m0s"),
    ],
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def an_allowance(limits: KeyLimits, rank: int = 0, num_routers: int = 1) -> Allowance:
    """Under a clock that stands still."""
    made = Allowance(lambda: 0.0, lambda _limit: None)
    made.fit(limits, rank, num_routers)
    return made


def retry_after_s(allowance: Allowance) -> float:
    with pytest.raises(RateLimitExceeded) as caught:
        allowance.enter()
    return caught.value.retry_after_s


@pytest.mark.parametrize(
    ("limit", "num_routers", "wait_s"),
    [(1_000_000, 1, 128_000 * 60 / 1_000_000), (10_000, 2, 128_000 * 60 / 5_000), (10_000, 1, 12.8 * 60)],
)
def test_what_is_owed_is_paid_at_the_rate_of_now(limit: int, num_routers: int, wait_s: float) -> None:
    """Answers of 138,000 tokens at 10,000 a minute. What was owed grew and shrank with the limit."""
    allowance = an_allowance(KeyLimits(tokens_per_minute=10_000))
    allowance.spend(138_000)
    allowance.fit(KeyLimits(tokens_per_minute=limit), 0, num_routers)
    assert retry_after_s(allowance) == pytest.approx(wait_s, abs=0.1)


def num_let_in(allowance: Allowance) -> int:
    """Prompts at a time."""
    for number in count():
        try:
            allowance.enter()
        except RateLimitExceeded:
            return number
    raise AssertionError


@given(st.integers(1, 50), st.integers(1, 9))
def test_routers_let_in_as_many_at_a_time_as_the_limit_says(most: int, num_routers: int) -> None:
    """Of five at a time three Routers let in three. One each is the least: a key must work at all of them."""
    limits = KeyLimits(max_concurrent=most)
    parts = [num_let_in(an_allowance(limits, rank, num_routers)) for rank in range(num_routers)]
    assert sum(parts) == max(most, num_routers)
    assert max(parts) - min(parts) <= 1


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 60))
def test_a_batch_is_refused_for_good_by_all_routers_or_by_none(
    most: int, num_routers: int, num_prompts: int
) -> None:
    """For good where it does not fit into the least part, and there is room for it where it does."""
    refused = set[bool]()
    for rank in range(num_routers):
        allowance = an_allowance(KeyLimits(max_concurrent=most), rank, num_routers)
        allowance.enter()
        try:
            allowance.charge(num_prompts - 1, 0)
            refused.add(False)
        except InvalidField:
            refused.add(True)
    assert refused == {num_prompts > max(1, most // num_routers)}


def test_nobodys_request_is_never_limited() -> None:
    OPEN_VISIT.charge(64, 1 << 40)
    OPEN_VISIT.spend(1 << 40)
    OPEN_VISIT.close()
    assert (OPEN_VISIT.tenant, OPEN_VISIT.headers()) == ("", {})
