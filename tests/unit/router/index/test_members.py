"""Replicas as numbers: as few as there are at one time, and never one with somebody's entries left."""

from __future__ import annotations

from router.index.members import MAX_BEGINNINGS, MAX_NAMED_SETS, Members, numbers
from tests.fakes.router import replica_id

A, B, C = replica_id(0), replica_id(1), replica_id(2)


def test_a_number_is_given_again_only_when_it_is_free() -> None:
    members = Members()
    assert [members.add(name) for name in (A, B)] == [0, 1]
    members.remove(0)
    assert members.live == 0b10
    assert members.add(C) == 2, "0 still has entries"
    members.free(0)
    assert members.add(A) == 0
    assert members.names(0b111) == (A, B, C)


def test_low_numbers_go_first_so_that_high_ones_can_be_withdrawn() -> None:
    members = Members()
    for index in range(130):
        members.add(replica_id(index))
    for number in range(3, 130):
        members.remove(number)
        members.free(number)
    assert members.add(A) == 3
    assert not members.withdraw(2), "2 and 3 are in use"
    assert members.withdraw(64)
    assert members.num_numbers == 64


def test_each_member_is_at_the_deepest_depth_it_is_met_at() -> None:
    members = Members()
    for name in (A, B, C):
        members.add(name)
    assert members.depths([]) == {}
    assert members.depths([(3, 0b111), (5, 0b010)]) == {A: 3, B: 5, C: 3}
    assert members.depths([(3, 0b111)]) == {A: 3, B: 3, C: 3}, "an answer given is nobody's to change"


def test_names_follow_their_numbers_new_owners() -> None:
    members = Members()
    number = members.add(A)
    assert members.depths([(1, 1)]) == {A: 1}
    members.rename(number, B)
    assert members.depths([(1, 1)]) == {B: 1}
    members.remove(number)
    members.free(number)
    members.add(C)
    assert members.depths([(1, 1)]) == {C: 1}


def test_what_is_kept_ready_is_bounded() -> None:
    members = Members()
    for index in range(20):
        members.add(replica_id(index))
    for pattern in range(1, MAX_NAMED_SETS + 100):
        members.depths([(pattern, pattern)])
    assert len(members._named_sets) <= MAX_NAMED_SETS
    assert len(members._beginnings) <= MAX_BEGINNINGS


def test_numbers_of_a_bit_set() -> None:
    assert numbers(0) == []
    assert numbers(0b1011) == [0, 1, 3]
    assert numbers(1 << 200 | 1) == [0, 200]
