"""What new blocks cost a cache, worked by hand."""

from __future__ import annotations

import math

import pytest

from router.pricing.evictions import FORGET_AFTER, Evictions
from tests.fakes.router import replica_id

A, B = replica_id(0), replica_id(1)


@pytest.fixture
def evictions() -> Evictions:
    """Two replicas of one size."""
    fleet = Evictions()
    fleet.add(A, 100_000)
    fleet.add(B, 100_000)
    return fleet


def test_where_nothing_comes_back_room_costs_nothing(evictions: Evictions) -> None:
    evictions.evicted(A, 50)
    assert evictions.regret == evictions.regret_of(A) == 0.0


def test_where_nothing_is_evicted_room_costs_nothing(evictions: Evictions) -> None:
    """What is missed has gone with a replica."""
    evictions.missed(50)
    assert evictions.regret == evictions.regret_of(A) == 0.0


def test_of_replicas_that_evict_alike_each_block_is_regretted_alike(evictions: Evictions) -> None:
    evictions.evicted(A, 50)
    evictions.evicted(B, 50)
    evictions.missed(40)
    assert evictions.regret == pytest.approx(0.4, rel=1e-3)
    assert evictions.regret_of(A) == pytest.approx(0.4, rel=1e-3)
    assert evictions.regret_of(B) == pytest.approx(0.4, rel=1e-3)


def test_who_evicts_three_times_as_much_is_to_blame_for_three_times_as_much(evictions: Evictions) -> None:
    evictions.evicted(A, 75)
    evictions.evicted(B, 25)
    evictions.missed(40)
    assert evictions.regret_of(A) == pytest.approx(0.6, rel=1e-3)
    assert evictions.regret_of(B) == pytest.approx(0.2, rel=1e-3)


def test_a_larger_cache_may_evict_more() -> None:
    fleet = Evictions()
    fleet.add(A, 300_000)
    fleet.add(B, 100_000)
    fleet.evicted(A, 75)
    fleet.evicted(B, 25)
    fleet.missed(40)
    assert fleet.regret_of(A) == pytest.approx(fleet.regret_of(B), rel=1e-3)
    assert fleet.regret_of(A) == pytest.approx(0.4, rel=1e-3)


def test_no_block_is_missed_more_than_once(evictions: Evictions) -> None:
    evictions.evicted(A, 50)
    evictions.missed(200)
    assert evictions.regret == evictions.regret_of(A) == 1.0
    assert evictions.regret_of(B) == 0.0


def test_what_was_counted_fades_as_the_caches_turn_over(evictions: Evictions) -> None:
    """When half of the fleet's room was evicted since, by B alone, 1 / e is left of what A evicted."""
    evictions.evicted(A, 1000)
    for _ in range(100):
        evictions.evicted(B, 1000)
    share = evictions._evicted[A] / evictions._total_evicted
    kept = 1000 / math.e
    assert FORGET_AFTER * 200_000 == 100_000
    assert share == pytest.approx(kept / (kept + 100_000 * (1 - 1 / math.e)), rel=0.02)


def test_what_a_replica_evicts_was_in_use_as_often_as_its_own_blocks_were(evictions: Evictions) -> None:
    evictions.evicted(A, 60, num_uses=300)
    evictions.evicted(A, 40)
    evictions.evicted(B, 100)
    assert evictions.uses_lost(A) == pytest.approx(3.0, rel=1e-2)
    assert evictions.uses_lost(B) == 0.0
    evictions.evicted(A, 200_000)
    assert evictions.uses_lost(A) == pytest.approx(0.0, abs=1e-2)


def test_who_joins_is_to_blame_for_nothing_and_who_leaves_no_more(evictions: Evictions) -> None:
    evictions.evicted(A, 50)
    evictions.evicted(B, 50)
    evictions.missed(20)
    joined = replica_id(2)
    evictions.add(joined, 100_000)
    assert evictions.regret_of(joined) == evictions.uses_lost(joined) == 0.0
    evictions.remove(A)
    evictions.remove(joined)
    assert evictions.regret_of(B) == evictions.regret == pytest.approx(0.4, rel=1e-3)
