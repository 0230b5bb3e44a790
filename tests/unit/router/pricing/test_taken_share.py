"""How often newcomers have found no replica free lately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing.cost import price
from router.pricing.fleet_load import FleetLoad
from router.pricing.replica_state import ReplicaState
from router.pricing.taken_share import OVER, TakenShare, free_part
from tests.fakes.router import STEP_TIME, FakeClock, info, replica_id

NOW = 1000.0


def test_a_fleet_that_nobody_has_come_to_is_free() -> None:
    assert TakenShare().value == 0.0


def test_it_follows_those_that_came_lately() -> None:
    taken = TakenShare()
    for _ in range(10 * OVER):
        taken.note(0.0)
    assert taken.value == pytest.approx(1.0, abs=0.01)
    taken.note(1.0)
    assert taken.value == pytest.approx(1.0 - 1 / OVER, abs=0.01)


@given(st.lists(st.floats(0, 1)))
def test_it_is_a_share(parts: list[float]) -> None:
    taken = TakenShare()
    for part in parts:
        taken.note(part)
        assert 0.0 <= taken.value <= 1.0


def state(*, busy_until: float = 0.0, slowness: float = 1.0, alone_s: float = 0.0) -> ReplicaState:
    fleet = FleetLoad(FakeClock(), reservation_ttl_s=30.0, silent_after_s=5.0)
    fleet.add_replica(replica_id(0), info())
    priced = price(busy_until, STEP_TIME, 512, 0, 0, 0.0, alone_s=alone_s)
    return fleet.states()[0]._replace(busy_until=busy_until, slowness=slowness, price=priced)


BUSY, FREE = state(busy_until=NOW + 0.1), state(busy_until=NOW)


@pytest.mark.parametrize(
    ("states", "part"),
    [
        ([BUSY, BUSY], 0.0),
        ([BUSY, FREE], 1.0),
        ([BUSY, state(slowness=10.0)], 0.1),
        ([state(slowness=10.0), state(slowness=2.0)], 0.5),
        ([state(slowness=0.5)], 1.0),
        ([BUSY, state(alone_s=0.01)], 0.0),
    ],
    ids=["none", "one", "a slow one", "two slow ones", "a quick one", "on a machine that others compute on"],
)
def test_what_is_free_by_hand(states: list[ReplicaState], part: float) -> None:
    assert free_part(states, NOW) == part
