"""What each replica probably caches, by imitating its cache: one LRU of prefixes per replica, of its size.

Knows prefixes by name and replicas; knows neither text nor load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cache.types import ReplicaId


class ReplicaLru:
    """A prompt's prefixes enter the LRU of the replica it is sent to; a prefix leaves before its parent."""

    def __init__(self) -> None:
        self._lrus: dict[ReplicaId, OrderedDict[int, None]] = {}
        self._capacity: dict[ReplicaId, int] = {}
        self._holders: dict[int, set[ReplicaId]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def num_prefixes(self, replica_id: ReplicaId) -> int:
        return len(self._lrus.get(replica_id, ()))

    def add(self, replica_id: ReplicaId, capacity: int) -> None:
        """capacity: prefixes that it can keep."""
        self._lrus.setdefault(replica_id, OrderedDict())
        self._capacity[replica_id] = capacity

    def remove(self, replica_id: ReplicaId) -> None:
        """O(its prefixes)."""
        for prefix in self._lrus.pop(replica_id, ()):
            self._drop(prefix, replica_id)
        self._capacity.pop(replica_id, None)

    def count(self, prefixes: Sequence[int]) -> dict[ReplicaId, int]:
        """How many of the prefixes each replica holds, up to the first that nobody holds.

        A replica's need not be contiguous.
        """
        counts: dict[ReplicaId, int] = {}
        for prefix in prefixes:
            holders = self._holders.get(prefix)
            if holders is None:
                break
            for replica_id in holders:
                counts[replica_id] = counts.get(replica_id, 0) + 1
        return counts

    def insert(self, prefixes: Sequence[int], replica_id: ReplicaId) -> None:
        """The prompt was sent there. Nothing happens for an unknown replica. O(prefixes)."""
        lru = self._lrus.get(replica_id)
        if lru is None:
            return
        for prefix in reversed(prefixes):
            if prefix in lru:
                lru.move_to_end(prefix)
            else:
                lru[prefix] = None
                self._holders.setdefault(prefix, set()).add(replica_id)
        while len(lru) > self._capacity[replica_id]:
            prefix, _ = lru.popitem(last=False)
            self._drop(prefix, replica_id)

    def _drop(self, prefix: int, replica_id: ReplicaId) -> None:
        holders = self._holders[prefix]
        holders.discard(replica_id)
        if not holders:
            del self._holders[prefix]
