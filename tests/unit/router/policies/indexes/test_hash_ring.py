"""The consistent hash ring: who owns a key, who is next, and what moves when somebody leaves."""

from __future__ import annotations

from collections import Counter

from cache.types import ReplicaId
from router.policies.indexes.hash_ring import HashRing, position

NAMES = [ReplicaId(f"r{i}") for i in range(8)]
KEYS = [position(f"key{i}") for i in range(4000)]


def ring(num_points: int = 256) -> HashRing:
    made = HashRing(num_points)
    for name in NAMES:
        made.add(name)
    return made


def test_a_walk_meets_every_replica_once() -> None:
    assert sorted(ring().walk(12345)) == sorted(NAMES)


def test_an_empty_ring_has_nobody() -> None:
    assert list(HashRing(16).walk(7)) == []


def test_keys_are_shared_about_equally() -> None:
    shares = Counter(next(ring_walk) for ring_walk in map(ring().walk, KEYS))
    assert len(shares) == 8
    assert max(shares.values()) < 1.35 * 500
    assert min(shares.values()) > 0.65 * 500


def test_only_the_leavers_keys_move_and_go_to_who_was_next() -> None:
    made = ring()
    before = [list(made.walk(key))[:2] for key in KEYS]
    made.remove(NAMES[3])
    for key, (first, second) in zip(KEYS, before, strict=True):
        assert next(made.walk(key)) == (second if first == NAMES[3] else first)


def test_the_order_of_joining_does_not_matter() -> None:
    backwards = HashRing(256)
    for name in reversed(NAMES):
        backwards.add(name)
    made = ring()
    assert all(list(made.walk(key)) == list(backwards.walk(key)) for key in KEYS[:200])


def test_joining_twice_and_leaving_twice_is_once() -> None:
    made = HashRing(4)
    made.add(NAMES[0])
    made.add(NAMES[0])
    made.remove(NAMES[0])
    made.remove(NAMES[0])
    assert len(made) == 0
    assert list(made.walk(0)) == []


def test_the_walk_goes_clockwise_and_around_the_end() -> None:
    made = ring(1)
    points = sorted((position(f"{name}#0"), name) for name in NAMES)
    assert list(made.walk(points[2][0])) == [name for _, name in points[2:] + points[:2]]
    assert next(made.walk(points[-1][0] + 1)) == points[0][1]
