"""Lag without a common clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.events.event_lag import LAG_BUCKETS_S, WINDOW_S, LagCounts, LagMeter


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=20),
)
def test_whatever_the_clocks_lag_is_what_exceeds_the_least_delay(
    offset_s: float, delays_s: list[float]
) -> None:
    meter = LagMeter()
    for number, delay_s in enumerate(delays_s):
        sent_s = 10.0 * number
        lag_s = meter.lag_s(sent_s + offset_s, sent_s + delay_s)
        assert lag_s == pytest.approx(delay_s - min(delays_s[: number + 1]), abs=1e-6)
        assert lag_s >= 0.0
        assert meter.last_s == lag_s


def test_a_clock_that_drifts_is_followed() -> None:
    meter = LagMeter()
    for number in range(100):
        now_s = number * WINDOW_S / 4
        lag_s = meter.lag_s(now_s * (1 + 1e-5), now_s)  # the sender's clock runs fast
        assert lag_s < 1e-5 * 2 * WINDOW_S
        lag_s = meter.lag_s(now_s * (1 - 1e-5), now_s + 50.0)
        assert lag_s >= 0.0


def test_another_sender_starts_anew() -> None:
    meter = LagMeter()
    meter.lag_s(0.0, 0.0)
    assert meter.lag_s(1.0, 500.0) == 499.0
    meter.forget()
    assert meter.last_s == 0.0
    assert meter.lag_s(1.0, 500.0) == 0.0


def test_counts_fall_into_buckets_by_upper_bound() -> None:
    counts = LagCounts()
    for lag_s in (0.0, LAG_BUCKETS_S[0], 0.0011, 99.0):
        counts.add(lag_s)
    assert counts.counts[0] == 2
    assert counts.counts[1] == 1
    assert counts.counts[-1] == 1
    assert counts.sum_s == pytest.approx(99.0021)
