"""The verdict on several routers beside one."""

from __future__ import annotations

import pytest

from loadtest.simulation.several_routers import Result, Turn


def result(*rounds: tuple[float, float]) -> Result:
    """Mean seconds behind one router and behind two, per round."""
    return Result(tuple((Turn(1, one, 0.5, 0.0), Turn(2, two, 0.5, 0.0)) for one, two in rounds))


def test_rounds_are_compared_by_themselves() -> None:
    """A heavy workload counts no more than a light one, and what it takes longer is nobody's fault."""
    assert result((0.1, 0.11), (10.0, 10.0)).beside_one(2).estimate == pytest.approx(1.1**0.5)


def test_two_routers_hold_within_two_percent_of_one() -> None:
    assert result((1.0, 1.01), (2.0, 2.05)).holds
    assert not result((1.0, 1.03), (2.0, 2.05)).holds
