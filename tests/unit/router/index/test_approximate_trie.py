"""Imitated caches, case by case; their law is in `tests/property/test_approximate_trie.py`."""

from __future__ import annotations

import pytest

from cache.errors import ConfigError
from router.index.approximate_trie import ApproximateTrie
from tests.fakes.router import hint_chain, replica_id

A, B = replica_id(0), replica_id(1)


def a_trie(capacity: int = 10) -> ApproximateTrie:
    trie = ApproximateTrie()
    trie.add_replica(A, capacity)
    trie.add_replica(B, capacity)
    return trie


def test_what_was_routed_there_is_held_there() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.insert(A, prompt)
    trie.insert(B, prompt[:2])
    assert trie.match(prompt) == {A: 6, B: 2}
    assert trie.match([]) == {}


def test_outputs_make_the_next_turn_match() -> None:
    trie, turn = a_trie(), hint_chain("p", 4)
    answer = [*turn, *hint_chain("answer", 3)]
    trie.insert(A, turn)
    trie.insert(A, answer)
    assert trie.match([*answer, *hint_chain("question", 2)]) == {A: 7}


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    trie, old, new = a_trie(), hint_chain("old", 6), hint_chain("new", 7)
    trie.insert(A, old)
    trie.insert(A, new)
    assert trie.match(old) == {A: 3}
    assert trie.match(new) == {A: 7}
    assert trie.num_blocks(A) == 10


def test_a_shared_beginning_outlives_what_branches_off_it() -> None:
    trie, system = a_trie(capacity=8), hint_chain("system", 4)
    for name in "abcdef":
        trie.insert(A, [*system, *hint_chain(name, 3)])
        assert trie.match(system) == {A: 4}
    assert trie.match([*system, *hint_chain("e", 3)]) == {A: 5}


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    trie, prompt = a_trie(capacity=4), hint_chain("p", 9)
    trie.insert(A, prompt)
    assert trie.match(prompt) == {A: 4}


def test_a_replica_that_leaves_takes_everything_with_it() -> None:
    trie = a_trie(capacity=1000)
    for index in range(300):
        trie.insert(A, hint_chain(str(index), 3))
    trie.insert(B, hint_chain("0", 3))
    assert A in trie
    trie.remove_replica(A)
    assert A not in trie
    assert trie.match(hint_chain("0", 3)) == {B: 3}
    for _ in range(4):
        trie.insert(B, hint_chain("0", 3))
    assert trie.num_entries == 3
    trie.add_replica(A, 5)
    assert trie.match(hint_chain("1", 3)) == {}


def test_a_thousand_replicas_come_and_go_and_nothing_stays() -> None:
    trie = ApproximateTrie()
    for index in range(1000):
        trie.add_replica(replica_id(index), 10)
        trie.insert(replica_id(index), hint_chain(f"p{index}", 4))
        trie.remove_replica(replica_id(index))
    assert trie.num_entries == 0
    assert trie._members.num_numbers == 1


def test_a_cache_holds_at_least_one_block() -> None:
    with pytest.raises(ConfigError, match="capacity_blocks"):
        ApproximateTrie().add_replica(A, 0)
