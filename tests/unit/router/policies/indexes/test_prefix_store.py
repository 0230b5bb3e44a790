"""The table of prefixes and who was sent them: matches, age, size."""

from __future__ import annotations

import math

from cache.types import ReplicaId
from router.policies.indexes.prefix_store import PrefixStore

A, B = ReplicaId("a"), ReplicaId("b")


def store(capacity: int = 100, ttl_s: float = math.inf) -> PrefixStore:
    made = PrefixStore(capacity, ttl_s)
    made.add(A)
    made.add(B)
    return made


def test_each_replica_is_matched_as_far_as_it_was_sent() -> None:
    s = store()
    s.insert([1, 2, 3], 1, A, 0.0)
    s.insert([1, 2, 9], 1, B, 0.0)
    assert s.match([1, 2, 3, 4], [A, B]) == {A: 3, B: 2}
    assert s.match([1, 2, 3, 4], [B]) == {B: 2}
    assert s.match([5], [A, B]) == {}


def test_a_match_has_no_gaps() -> None:
    s = store()
    s.insert([1, 2, 3], 1, A, 0.0)
    s.insert([1], 1, B, 0.0)
    s.insert([3], 1, B, 0.0)
    assert s.match([1, 2, 3], [A, B]) == {A: 3, B: 1}


def test_the_least_recently_used_prompt_leaves_tail_first() -> None:
    s = store(capacity=4)
    s.insert([1, 2], 1, A, 0.0)
    s.insert([3, 4], 1, A, 1.0)
    s.insert([5], 1, A, 2.0)
    assert s.match([1, 2], [A]) == {A: 1}
    assert s.match([3, 4], [A]) == {A: 2}
    assert len(s) == 4


def test_size_counts_in_the_callers_units() -> None:
    s = store(capacity=10)
    s.insert([1, 2], 4, A, 0.0)
    s.insert([3], 4, A, 1.0)
    assert len(s) == 2


def test_prefixes_unused_for_too_long_are_gone() -> None:
    s = store(ttl_s=10.0)
    s.insert([1, 2], 1, A, 0.0)
    s.insert([1], 1, B, 8.0)
    s.expire(10.0)
    assert len(s) == 2
    s.expire(10.1)
    assert s.match([1, 2], [A, B]) == {A: 1, B: 1}
    s.expire(18.1)
    assert len(s) == 0


def test_who_left_is_in_no_entry_and_comes_back_empty() -> None:
    s = store(capacity=3)
    s.insert([1, 2], 1, A, 0.0)
    s.insert([1], 1, B, 0.0)
    s.remove(A)
    assert len(s) == 1
    s.insert([7], 1, A, 0.0)  # unknown by now
    assert s.match([7], [A]) == {}
    s.add(A)
    assert s.match([1, 2], [A, B]) == {B: 1}
    s.insert([4, 5], 1, A, 1.0)  # fits: what left has given its room back
    assert s.match([1], [B]) == {B: 1}
