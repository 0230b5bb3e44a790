"""Laws of a bucket: its rate holds over any time, and what it says to wait for is there then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tenants.token_bucket import TokenBucket

RATES = st.floats(0.5, 1e6)
STEPS = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1e5)), max_size=40)


@given(RATES, STEPS)
def test_never_more_than_a_full_bucket_and_the_rate(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    """Taken only when the bucket says it may be: over all times, at most capacity + time * rate."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for pause_s, amount in steps:
        now += pause_s
        amount = min(amount, bucket.capacity)
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken += amount
        assert bucket.level(now) <= bucket.capacity
        assert taken <= (bucket.capacity + now * bucket.rate) * (1 + 1e-9)


@given(RATES, STEPS, st.floats(0.0, 1e7))
def test_after_the_wait_it_is_there(
    per_minute: float, steps: list[tuple[float, float]], amount: float
) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for pause_s, taken in steps:  # whether it is there or not: debts too
        now += pause_s
        bucket.take(taken, now)
    wait_s = bucket.wait_s(amount, now)
    later = now + wait_s
    assert bucket.level(later) >= min(amount, bucket.capacity) * (1 - 1e-9) - 1e-6 * bucket.rate
    assert bucket.full_in_s(now) >= 0.0


@given(RATES, RATES, st.floats(0.0, 1e6))
def test_a_debt_stays_what_it_is_at_another_rate(before: float, after: float, debt: float) -> None:
    """It is of tokens that were had. Taken for so many minutes' worth it grew with the limit."""
    bucket = TokenBucket(before, 0.0)
    bucket.take(bucket.capacity + debt, 0.0)
    bucket.resize(after, 0.0)
    assert bucket.level(0.0) == pytest.approx(-debt, abs=1e-6)


@given(RATES, st.floats(1.0, 1000.0), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_at_a_higher_rate_nobody_waits_longer(
    before: float, times: float, taken: float, amount: float
) -> None:
    bucket = TokenBucket(before, 0.0)
    bucket.take(taken, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    bucket.resize(times * before, 0.0)
    assert bucket.wait_s(amount, 0.0) <= wait_s * (1 + 1e-9) + 1e-6


@given(RATES, RATES, st.floats(0.0, 1.0))
def test_another_rate_keeps_the_share_that_is_left(before: float, after: float, share: float) -> None:
    bucket = TokenBucket(before, 0.0)
    bucket.take(share * bucket.capacity, 0.0)
    bucket.resize(after, 0.0)
    assert bucket.level(0.0) == pytest.approx((1 - share) * bucket.capacity, abs=1e-6)
    assert bucket.capacity >= 1.0
