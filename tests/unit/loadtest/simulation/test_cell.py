"""A cell's name and its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadtest.simulation.cell import Failure, Scaling
from loadtest.simulation.run import simulate
from tests.fakes.simulation import spec, unrelated


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_routers": 0}, "num_routers"),
        ({"cache_tokens": 0}, "cache_tokens"),
        ({"load": 0.0}, "load"),
        ({"event_delay_s": -0.1}, "event_delay_s"),
        ({"slowdowns": (1.0, 1.0, 1.0)}, "slowdowns"),
        ({"slowdowns": (0.0,)}, "slowdowns"),
        ({"policy_options": (("b", 1), ("a", 1))}, "policy_options"),
    ],
)
def test_an_impossible_cell_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        spec(**changes)


def test_impossible_events_are_refused() -> None:
    with pytest.raises(ValueError, match="failure"):
        Failure(-1.0, 0)
    with pytest.raises(ValueError, match="scaling"):
        Scaling(1.0, 0)


def test_a_digest_names_everything_the_result_depends_on() -> None:
    cell = spec()
    assert replace(cell).digest() == cell.digest()
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"load": 0.5},
        {"policy": "expected_time"},
        {"policy_options": (("near_tie", 0.1),)},
        {"machine": replace(cell.machine, base_s=0.02)},
        {"failures": (Failure(1.0, 0),)},
        {"num_routers": 2},
    ]
    digests = {replace(cell, **change).digest() for change in changes}
    assert len(digests | {cell.digest()}) == len(changes) + 1


def test_the_numbers_of_a_result() -> None:
    """Two requests on one replica, one after the other."""
    result = simulate(unrelated((0.0, 32, 3), (10.0, 64, 1)), spec(num_replicas=1))
    assert result.mean_ttft_s == pytest.approx(float(np.mean(result.ttft_s)))
    assert result.ttft_quantile_s(0.5) == pytest.approx(result.mean_ttft_s)
    assert result.hit_ratio == 0.0
    assert result.imbalance == 1.0
    assert result.prefill_tokens.tolist() == [96]
    assert result.mean_tpot_s == pytest.approx((result.e2e_s[0] - result.ttft_s[0]) / 2)
    assert result.makespan_s == pytest.approx(10.0 + result.e2e_s[1])
    assert result.load_1_rate_per_s == 0.0
