"""A consistent hash ring: which replica a key belongs to, and which is next if that one will not do.

Each replica stands at many points of the ring, so that what a departed one had is shared among all others
and everything else stays where it was. Knows keys and replicas; knows no load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import xxhash

from cache.types import ReplicaId


class HashRing:
    """`num_points` points per replica, by xxHash64. The same replicas give the same ring in every process."""

    def __init__(self, num_points: int) -> None:
        self._num_points = num_points
        self._points: list[int] = []  # ascending
        self._owners: list[ReplicaId] = []  # of each point
        self._replicas: set[ReplicaId] = set()

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, replica_id: ReplicaId) -> None:
        """O(points)."""
        if replica_id in self._replicas:
            return
        self._replicas.add(replica_id)
        own = [(position(f"{replica_id}#{index}"), replica_id) for index in range(self._num_points)]
        self._set(sorted([*zip(self._points, self._owners, strict=True), *own]))

    def remove(self, replica_id: ReplicaId) -> None:
        """O(points)."""
        if replica_id in self._replicas:
            self._replicas.remove(replica_id)
            points = zip(self._points, self._owners, strict=True)
            self._set([pair for pair in points if pair[1] != replica_id])

    def walk(self, key: int) -> Iterator[ReplicaId]:
        """Every replica once, clockwise from `key`, which is a place on the ring: 0 to 2^64 - 1."""
        owners, seen = self._owners, set[ReplicaId]()
        first, count = bisect_left(self._points, key), len(owners)
        for step in range(count):
            owner = owners[(first + step) % count]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self._replicas):
                    return

    def _set(self, points: list[tuple[int, ReplicaId]]) -> None:
        self._points = [point for point, _ in points]
        self._owners = [owner for _, owner in points]


def position(key: str) -> int:
    """Where a text lies on any ring."""
    return xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"))
