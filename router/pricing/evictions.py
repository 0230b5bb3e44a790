"""What new blocks cost a cache: how much of what they push out is asked for again, and was in use.

A prompt computed on one replica takes the room of as many blocks there. Where sessions outlive the caches,
such a block is missed later with some probability, the `regret`, and computed again; where nothing comes back
it is none. Counted over the whole fleet:

    regret = blocks that were asked for lately and that nobody holds any more / blocks evicted

It is not the same everywhere. A replica that evicts twice as much of its room as the mean one throws away
blocks half as old, and those are missed the more often. So the regret of one replica is taken to be
proportional to the share of its room that it evicts: regret * turnover_r / mean turnover, at most 1.

Without it work that is cold goes to whichever machine is fastest, whatever that one has to forget for it,
while the caches of the others hold what nobody will ask for: a fleet with machines of two speeds then has
little more cache than its fast ones.

A copy of what somebody else holds misses nothing, and pushes out as much. Where all that is cached is in use,
each prefix is worth one more copy by its own uses, and each copy pushes out another one's: they make each
other for ever. So how often evicted blocks had been asked for lately is counted for each replica:

    uses_lost = uses of the blocks that it evicted / blocks that it evicted

All counts are forgotten as the caches turn over, and not by the clock: an hour without requests changes
nothing. Knows names and numbers of blocks; knows neither hashes nor time. Owner: the router's event loop.
"""

from __future__ import annotations

import math

from cache.types import ReplicaId

FORGET_AFTER = 0.5  # of the fleet's room: evictions by which what was counted before has faded to 1 / e
_ALL = 30.0  # times that: nothing is left of what was counted before
_RESCALE_AT = 1e9  # later counts weigh more instead of earlier ones less: before that grows too large


class Evictions:
    """Of one fleet, as its replicas' events and this router's requests tell."""

    def __init__(self) -> None:
        self._room: dict[ReplicaId, int] = {}  # blocks
        self._evicted: dict[ReplicaId, float] = {}  # blocks, weighted
        self._total_room = 0
        self._total_evicted = 0.0
        self._uses: dict[ReplicaId, float] = {}  # of those blocks, weighted alike
        self._missed = 0.0  # blocks, weighted
        self._weight = 1.0  # of a block evicted now

    def add(self, replica_id: ReplicaId, num_blocks: int) -> None:
        """It joins, with so much room. O(1)."""
        self._room[replica_id] = room = max(1, num_blocks)
        self._evicted[replica_id] = self._uses[replica_id] = 0.0
        self._total_room += room

    def remove(self, replica_id: ReplicaId) -> None:
        """It has left. O(replicas)."""
        self._total_room -= self._room.pop(replica_id)
        del self._evicted[replica_id], self._uses[replica_id]
        self._total_evicted = math.fsum(self._evicted.values())

    def evicted(self, replica_id: ReplicaId, num_blocks: int, num_uses: float = 0.0) -> None:
        """It has said that it holds so many blocks no longer, which were asked for so often lately, all
        together. O(1), and O(replicas) very seldom."""
        self._weight *= math.exp(min(num_blocks / (FORGET_AFTER * self._total_room), _ALL))
        self._evicted[replica_id] += num_blocks * self._weight
        self._uses[replica_id] += num_uses * self._weight
        self._total_evicted += num_blocks * self._weight
        if self._weight > _RESCALE_AT:
            self._rescale()

    def missed(self, num_blocks: float) -> None:
        """So many blocks were asked for that somebody had asked for lately, and nobody holds. O(1)."""
        self._missed += num_blocks * self._weight

    @property
    def regret(self) -> float:
        """Of a block evicted anywhere, how often it is missed; 0 to 1."""
        return min(1.0, self._missed / self._total_evicted) if self._total_evicted else 0.0

    def regret_of(self, replica_id: ReplicaId) -> float:
        """Of a block that this replica evicts, how often it is missed; 0 to 1. O(1)."""
        if not self._total_evicted:
            return 0.0
        share = self._evicted[replica_id] / self._total_evicted
        return min(1.0, self.regret * share * self._total_room / self._room[replica_id])

    def uses_lost(self, replica_id: ReplicaId) -> float:
        """Of a block that this replica evicts, how often it was asked for lately. O(1)."""
        evicted = self._evicted[replica_id]
        return self._uses[replica_id] / evicted if evicted else 0.0

    def _rescale(self) -> None:
        self._uses = {name: uses / self._weight for name, uses in self._uses.items()}
        self._evicted = {name: count / self._weight for name, count in self._evicted.items()}
        self._total_evicted = math.fsum(self._evicted.values())
        self._missed /= self._weight
        self._weight = 1.0
