"""The imitation of replicas' caches: one LRU each, of their size."""

from __future__ import annotations

from cache.types import ReplicaId
from router.policies.indexes.replica_lru import ReplicaLru

A, B = ReplicaId("a"), ReplicaId("b")


def lrus(capacity: int = 4) -> ReplicaLru:
    made = ReplicaLru()
    made.add(A, capacity)
    made.add(B, capacity)
    return made


def test_counts_need_not_be_contiguous_but_end_at_what_nobody_holds() -> None:
    lru = lrus()
    lru.insert([1, 2, 3], A)
    lru.insert([1], B)
    lru.insert([3], B)
    assert lru.count([1, 2, 3]) == {A: 3, B: 2}
    assert lru.count([1, 9, 3]) == {A: 1, B: 1}
    assert lru.count([]) == {}


def test_each_forgets_by_its_own_size_tails_first() -> None:
    lru = lrus(capacity=4)
    lru.insert([1, 2, 3], A)
    lru.insert([1, 2, 3], B)
    lru.insert([8, 9], A)
    assert lru.count([1, 2, 3]) == {A: 2, B: 3}
    assert lru.num_prefixes(A) == 4


def test_what_is_used_again_stays() -> None:
    lru = lrus(capacity=3)
    lru.insert([1], A)
    lru.insert([2], A)
    lru.insert([1], A)
    lru.insert([3, 4], A)
    assert lru.count([1]) == {A: 1}
    assert lru.count([2]) == {}


def test_who_left_holds_nothing_and_is_given_nothing() -> None:
    lru = lrus()
    lru.insert([1, 2], A)
    lru.remove(A)
    lru.insert([1], A)
    assert lru.count([1]) == {}
    assert len(lru) == 0
