"""What computing again is charged: it grows faster than the queues, and has an end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.expected_time import ExpectedTimeOptions
from router.pricing.cost import RecomputeCharge


@pytest.mark.parametrize(
    ("queued", "weight"),
    [(0.0, 2.0), (1.0, 5.0), (2.0, 10.0), (4.0, 26.0), (8.0, 82.0), (9.0, 100.0), (1000.0, 100.0)],
)
def test_the_charge_is_what_an_empty_queue_costs_and_those_who_will_wait(
    queued: float, weight: float
) -> None:
    assert RecomputeCharge().weight(queued) == weight


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_more_queued_never_makes_computing_again_cheaper(queued: float, more: float) -> None:
    charge = RecomputeCharge(idle=1.5, per_queued=0.5, most=40.0)
    assert charge.idle <= charge.weight(queued) <= charge.weight(queued + more) <= charge.most


def test_the_policy_s_knobs_start_at_the_charge_s_own_values() -> None:
    options = ExpectedTimeOptions()
    assert RecomputeCharge() == RecomputeCharge(
        options.recompute_idle, options.recompute_per_queued, options.recompute_most
    )
