"""What one key may still take at a Router, and how durations are written."""

from __future__ import annotations

import pytest

from router.errors import RateLimitExceeded
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


def an_allowance(limits: KeyLimits, num_routers: int = 1) -> Allowance:
    """Under a clock that stands still."""
    made = Allowance(lambda: 0.0, lambda _limit: None)
    made.fit(limits, num_routers)
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
    allowance.fit(KeyLimits(tokens_per_minute=limit), num_routers)
    assert retry_after_s(allowance) == pytest.approx(wait_s, abs=0.1)


def test_nobodys_request_is_never_limited() -> None:
    OPEN_VISIT.charge(64, 1 << 40)
    OPEN_VISIT.spend(1 << 40)
    OPEN_VISIT.close()
    assert (OPEN_VISIT.tenant, OPEN_VISIT.headers()) == ("", {})
