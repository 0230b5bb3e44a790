"""What computing again is charged, and what full memory costs: either grows, and has an end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.expected_time import ExpectedTimeOptions
from router.pricing.cost import RecomputeCharge, memory_pressure


@pytest.mark.parametrize(
    ("queued", "weight"),
    [(0.0, 2.0), (1.0, 5.0), (2.0, 10.0), (4.0, 26.0), (8.0, 82.0), (9.0, 100.0), (1000.0, 100.0)],
)
def test_the_charge_is_what_an_empty_queue_costs_and_those_who_will_wait(
    queued: float, weight: float
) -> None:
    assert RecomputeCharge().weight(queued, taken=1.0) == weight


@pytest.mark.parametrize(
    ("queued", "taken", "weight"), [(0.0, 0.75, 1.75), (0.0, 0.5, 1.5), (0.0, 0.0, 1.5), (2.0, 0.5, 8.5)]
)
def test_the_oftener_a_replica_is_free_the_less_computing_again_delays(
    queued: float, taken: float, weight: float
) -> None:
    """1 + (taken + q) * (1 + q), taken at least one half: twins of a burst stay together."""
    assert RecomputeCharge().weight(queued, taken) == weight


@pytest.mark.parametrize(("used", "pressure"), [(0.0, 0.0), (0.2, 0.25), (0.5, 1.0), (0.95, 1.0), (1.0, 1.0)])
def test_memory_that_is_half_full_is_full(used: float, pressure: float) -> None:
    """A saturated replica's is always near its end: one more block there says nothing."""
    assert memory_pressure(used) == pytest.approx(pressure)


shares = st.floats(0, 1)


@given(st.floats(0, 1e6), st.floats(0, 1e6), shares, shares)
def test_more_queued_or_fewer_free_never_makes_computing_again_cheaper(
    queued: float, more: float, one: float, other: float
) -> None:
    charge = RecomputeCharge(idle=1.5, per_queued=0.5, most=40.0)
    less, most = sorted((one, other))
    few, many = charge.weight(queued, less), charge.weight(queued + more, less)
    assert 1.0 <= few <= many <= charge.weight(queued + more, most) <= charge.most


def test_the_policy_s_knobs_start_at_the_charge_s_own_values() -> None:
    options = ExpectedTimeOptions()
    assert RecomputeCharge() == RecomputeCharge(
        options.recompute_idle, options.recompute_per_queued, options.recompute_most
    )
