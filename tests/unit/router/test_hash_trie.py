"""The index, case by case; its laws are in `tests/property/test_hash_trie.py`."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from cache.events import Digest
from cache.types import HashHint
from router.hash_trie import HashTrie
from tests.fakes_router import hint_chain, replica_id

A, B, C = replica_id(0), replica_id(1), replica_id(2)


def a_trie() -> HashTrie:
    trie = HashTrie()
    for replica in (A, B, C):
        trie.add_replica(replica)
    return trie


def test_each_replica_is_matched_to_its_own_depth() -> None:
    trie, prompt = a_trie(), hint_chain("p", 100)
    trie.store(A, prompt[:7])
    trie.store(B, prompt)
    trie.store(C, prompt[:1])
    assert trie.match(prompt) == {A: 7, B: 100, C: 1}
    assert trie.match(prompt[:5]) == {A: 5, B: 5, C: 1}
    assert trie.match([]) == {}
    assert trie.match(hint_chain("other", 3)) == {}


def test_a_removal_before_its_store_does_not_resurrect_or_linger() -> None:
    trie, prompt = a_trie(), hint_chain("p", 3)
    trie.remove(A, prompt)
    assert trie.num_entries == 0
    trie.store(A, prompt)
    trie.remove(A, prompt)
    assert trie.match(prompt) == {}
    assert trie.digest(A) == Digest()
    assert trie.num_entries == 0


def test_storing_twice_counts_once() -> None:
    trie, prompt = a_trie(), hint_chain("p", 3)
    trie.store(A, prompt)
    before = trie.digest(A)
    trie.store(A, prompt)
    assert trie.digest(A) == before == Digest(3, prompt[0] ^ prompt[1] ^ prompt[2])


def test_a_snapshot_replaces_what_was_known() -> None:
    trie, old, new = a_trie(), hint_chain("old", 4), hint_chain("new", 5)
    trie.store(A, old)
    trie.store(B, old)
    trie.replace(A, [*old[:2], *new])
    assert trie.match(old) == {A: 2, B: 4}
    assert trie.match(new) == {A: 5}


def test_a_prediction_holds_until_it_expires() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.expire(4.9)
    assert trie.match(prompt) == {A: 6}
    trie.expire(5.0)
    assert trie.match(prompt) == {}
    assert trie.num_entries == 0


def test_a_confirmed_prediction_outlives_its_expiry() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.store(A, prompt)
    trie.expire(100.0)
    assert trie.match(prompt) == {A: 6}


def test_a_confirmed_prediction_does_not_outlive_an_eviction() -> None:
    """Once the engine has reported the whole prompt, its word is final."""
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.store(A, prompt)
    trie.remove(A, prompt[4:])
    assert trie.match(prompt) == {A: 4}


def test_an_eviction_before_the_prompt_is_computed_leaves_the_prediction() -> None:
    """The prompt was routed for blocks that are then evicted: it will compute them again."""
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.store(A, prompt[:4])
    trie.predict(A, prompt, expires_at=5.0)
    trie.remove(A, prompt[2:4])
    assert trie.match(prompt) == {A: 6}
    trie.expire(5.0)
    assert trie.match(prompt) == {A: 2}


def test_a_twin_renews_a_prediction_instead_of_adding_one() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.predict(A, prompt, expires_at=5.0)
    trie.predict(A, prompt, expires_at=7.0)
    trie.expire(5.0)
    assert trie.match(prompt) == {A: 6}
    trie.expire(7.0)
    assert trie.num_entries == 0


def test_a_shared_prefix_stays_while_any_prediction_covers_it() -> None:
    trie, short = a_trie(), hint_chain("p", 3)
    long = [*short, *hint_chain("q", 3)]
    trie.predict(A, long, expires_at=5.0)
    trie.predict(A, short, expires_at=8.0)
    trie.expire(5.0)
    assert trie.match(long) == {A: 3}


def test_predictions_are_bounded_and_the_oldest_ends_first() -> None:
    trie = HashTrie(max_predicted_blocks=10)
    trie.add_replica(A)
    first, second = hint_chain("first", 6), hint_chain("second", 6)
    trie.predict(A, first, expires_at=5.0)
    trie.predict(A, second, expires_at=5.0)
    assert trie.match(first) == {}
    assert trie.match(second) == {A: 6}
    trie.predict(A, hint_chain("huge", 11), expires_at=5.0)
    assert trie.num_entries == 0


def test_a_replica_that_leaves_takes_everything_with_it() -> None:
    trie, prompt = a_trie(), hint_chain("p", 6)
    trie.store(A, prompt[:3])
    trie.store(B, prompt[:2])
    trie.predict(A, prompt, expires_at=5.0)
    trie.remove_replica(A)
    trie.remove_replica(A)
    assert trie.match(prompt) == {B: 2}
    assert trie.num_entries == 2
    trie.expire(100.0)


def test_a_thousand_replicas_come_and_go_and_nothing_stays() -> None:
    trie = HashTrie()
    trie.add_replica(B)
    for index in range(1000):
        newcomer = replica_id(index + 10)
        prompt = hint_chain(f"p{index}", 4)
        trie.add_replica(newcomer)
        trie.store(newcomer, prompt[:2])
        trie.predict(newcomer, prompt, expires_at=1e9)
        assert trie.match(prompt) == {newcomer: 4}
        trie.remove_replica(newcomer)
    assert trie.num_entries == 0
    # Slots are reused: masks stay as narrow as the fleet.
    assert max(replica.bit for replica in trie._replicas.values()) <= 2


@pytest.mark.parametrize("num_replicas", [2, 12])
def test_the_byte_gauge_is_near_what_python_allocates(num_replicas: int) -> None:
    rng = random.Random(1)
    tracemalloc.start()
    try:
        trie = HashTrie()
        for index in range(num_replicas):
            trie.add_replica(replica_id(index))
            trie.store(replica_id(index), [HashHint(rng.getrandbits(64)) for _ in range(10_000)])
            trie.predict(replica_id(index), [HashHint(rng.getrandbits(64)) for _ in range(5_000)], 1.0)
        allocated = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.85 * allocated < trie.num_bytes() < 1.15 * allocated
