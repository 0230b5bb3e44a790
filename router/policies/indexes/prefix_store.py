"""Who was sent which prefix, as one bounded table: prefix -> replicas, least recently used prefix first out.

Prefixes are names of a prompt up to the end of a chunk (`prompt_chunks`), so equal chunks after different
beginnings differ. Knows names and replicas; knows neither text nor load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from cache.types import ReplicaId


class _Entry:
    __slots__ = ("holders", "size", "used_at")

    def __init__(self, size: int, used_at: float) -> None:
        self.holders: dict[ReplicaId, None] = {}
        self.size = size
        self.used_at = used_at


class PrefixStore:
    """At most `capacity` in units of the caller's, none of it older than `ttl_s`."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # a prefix always before its parent
        self._size = 0
        self._replicas: set[ReplicaId] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, replica_id: ReplicaId) -> None:
        self._replicas.add(replica_id)

    def match(self, prefixes: Sequence[int], among: Collection[ReplicaId]) -> dict[ReplicaId, int]:
        """Leading prefixes that each of these replicas was sent; those without any are left out.

        O(prefixes x holders).
        """
        matched: dict[ReplicaId, int] = {}
        holders = list(among)
        for length, prefix in enumerate(prefixes, start=1):
            entry = self._entries.get(prefix)
            if entry is None:
                break
            holders = [replica_id for replica_id in holders if replica_id in entry.holders]
            if not holders:
                break
            matched.update(dict.fromkeys(holders, length))
        return matched

    def insert(self, prefixes: Sequence[int], size: int, replica_id: ReplicaId, now: float) -> None:
        """A prompt with these prefixes, each of `size` units, went to the replica. O(prefixes).

        Nothing happens for an unknown replica.
        """
        if replica_id not in self._replicas:
            return
        entries = self._entries
        for prefix in reversed(prefixes):
            entry = entries.get(prefix)
            if entry is None:
                entry = entries[prefix] = _Entry(size, now)
                self._size += size
            else:
                entries.move_to_end(prefix)
                entry.used_at = now
            entry.holders[replica_id] = None
        self.expire(now)

    def expire(self, now: float) -> None:
        entries, unused_since = self._entries, now - self._ttl_s
        while entries:
            prefix, entry = next(iter(entries.items()))
            if self._size <= self._capacity and entry.used_at >= unused_since:
                break
            del entries[prefix]
            self._size -= entry.size

    def remove(self, replica_id: ReplicaId) -> None:
        """O(entries)."""
        self._replicas.discard(replica_id)
        for prefix, entry in list(self._entries.items()):
            if entry.holders.pop(replica_id, 0) is None and not entry.holders:
                del self._entries[prefix]
                self._size -= entry.size
