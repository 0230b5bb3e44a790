"""Whose queue counts, worked by hand."""

from __future__ import annotations

import pytest

from router.pricing.fleet_load import FleetLoad
from router.pricing.fleet_queue import FleetQueue, queue_of
from router.pricing.replica_state import ReplicaState
from tests.fakes.router import FakeClock, info, replica_id


def state(*, slowness: float, num_waiting: int) -> ReplicaState:
    fleet = FleetLoad(FakeClock(), reservation_ttl_s=30.0, silent_after_s=5.0)
    fleet.add_replica(replica_id(0), info())
    return fleet.states()[0]._replace(slowness=slowness, num_waiting=num_waiting)


def test_equal_replicas_count_alike() -> None:
    queue = queue_of([state(slowness=1.0, num_waiting=n) for n in (3, 0, 1)])
    assert queue == FleetQueue(4.0, 3.0)
    assert queue.mean(num_held=2.0) == 2.0


def test_a_slow_ones_queue_is_not_the_fleets() -> None:
    queue = queue_of([state(slowness=s, num_waiting=n) for s, n in ((1.0, 0), (1.0, 0), (10.0, 2))])
    assert queue == pytest.approx(FleetQueue(0.2, 2.1))
    assert queue.mean(num_held=0.0) == pytest.approx(0.2 / 2.1)


def test_one_that_is_quicker_counts_as_one() -> None:
    """A fit may have nothing in `base_s`: then its idle engine is infinitely quick."""
    assert queue_of([state(slowness=0.0, num_waiting=2)]) == FleetQueue(2.0, 1.0)


@pytest.mark.parametrize("slowness", [1e20, float("inf")])
def test_one_that_hardly_moves_is_a_part_of_one_when_the_others_have_left(slowness: float) -> None:
    quick, slow = state(slowness=1.0, num_waiting=5), state(slowness=slowness, num_waiting=2)
    assert queue_of([quick, slow]).without(quick).mean(num_held=0.0) == pytest.approx(2.0)
