"""What replicas that send no events probably hold: one cache of the engine's capacity per replica, imitated.

    routed    the prompt's blocks are held from now on, as most recently used
    finished  so are the output's
    beyond the capacity, the least recently used blocks go, the end of a chain before its beginning

An engine does the same with its own blocks, so what is left is what it has, but for the order in which
requests overlap. All replicas share one path-compressed tree; each has its nodes in a list by time of use.
A use of a node is a use of its parents, which are put behind it, so the list's first node never has a child
that the replica holds: cutting from there keeps every replica's set closed under parents.

Knows 64-bit hints, replica names and capacities; knows neither events nor load. Same questions as `HashTrie`.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache.errors import ConfigError
from cache.types import HashHint, ReplicaId
from router.index.members import Members
from router.index.radix_tree import Node, RadixTree

HOLD_BYTES = 80
REPLICA_BYTES = 500
LEAVING_PER_CALL = 128  # nodes of departed replicas let go with each call: a fraction of a millisecond


class _Hold:
    """One replica's claim on one node, between the one used before it and the one used after it."""

    __slots__ = ("newer", "node", "older", "replica")

    def __init__(self, replica: _Replica, node: Node[_Hold] | None) -> None:
        self.replica = replica
        self.node = node  # None: the ring's own, older than the oldest and newer than the newest
        self.older = self.newer = self


class _Replica:
    """One replica's holds in order of use. Written by `ApproximateTrie` alone."""

    __slots__ = ("capacity", "member", "num_blocks", "ring")

    def __init__(self, member: int, capacity: int) -> None:
        self.member = member
        self.capacity = capacity
        self.num_blocks = 0
        self.ring = _Hold(self, None)


class ApproximateTrie:
    """An LRU cache of chains per replica. See the module's text for its law."""

    def __init__(self) -> None:
        self._tree: RadixTree[_Hold] = RadixTree(self._hold_upper)
        self._members = Members()
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._leaving: deque[_Replica] = deque()
        self._num_holds = 0

    # --- membership ---------------------------------------------------------------------------

    def add_replica(self, replica_id: ReplicaId, capacity_blocks: int) -> None:
        """It holds nothing yet. Nothing happens if it is known.

        capacity_blocks: of its cache (`ReplicaInfo.num_blocks`). Raises ConfigError below 1.
        """
        if capacity_blocks < 1:
            raise ConfigError("capacity_blocks", capacity_blocks, "at least 1 block")
        if replica_id not in self._replicas:
            self._replicas[replica_id] = _Replica(self._members.add(replica_id), capacity_blocks)

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Forget the replica. It matches nobody at once; a large cache is let go over the next calls."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._members.remove(replica.member)
            self._leaving.append(replica)
            self._let_go()

    def __contains__(self, replica_id: ReplicaId) -> bool:
        """Whether its cache is imitated here."""
        return replica_id in self._replicas

    # --- changes ------------------------------------------------------------------------------

    def insert(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> None:
        """The replica computes, or has computed, these full blocks, parent first: they are its latest.

        Once when a prompt is routed there, once when its output is complete. A chain longer than the cache
        keeps its beginning. O(branches on its path * log(blocks) + nodes that have to go), and a copy of the
        hints that nobody had.
        """
        replica = self._replicas[replica_id]
        self._let_go()
        hints = hints[: replica.capacity]
        if not hints:
            return
        for node in self._tree.extend(hints).path():  # the end first: it shall go before its parents
            hold = node.records.get(replica.member)
            if hold is None:
                hold = _Hold(replica, node)
                self._tree.join(node, replica.member, hold)
                self._num_holds += 1
                replica.num_blocks += len(node.edge)
            else:
                _unlink(hold)
            _link_before(hold, replica.ring)
        while replica.num_blocks > replica.capacity:
            self._evict(replica)

    # --- questions ----------------------------------------------------------------------------

    def match(self, hints: Sequence[HashHint]) -> dict[ReplicaId, int]:
        """Leading blocks each replica probably holds; replicas that hold none are left out.

        hints: chain of one prompt's full blocks, parent first. Changes nothing.
        One pass for all replicas together: O(branches on its path * log(blocks)).
        """
        return self._members.depths(self._tree.match(hints, self._members.live))

    @property
    def num_replicas(self) -> int:
        """How many caches are imitated here."""
        return len(self._replicas)

    def num_blocks(self, replica_id: ReplicaId) -> int:
        """Blocks that one replica probably holds, at most its capacity. O(1)."""
        return self._replicas[replica_id].num_blocks

    @property
    def num_entries(self) -> int:
        """Distinct blocks that somebody holds, and what is yet to be let go."""
        return self._tree.num_hints

    def num_bytes(self) -> int:
        """Memory in use, within a few percent. O(1)."""
        return (
            self._tree.num_bytes()
            + HOLD_BYTES * self._num_holds
            + REPLICA_BYTES * len(self._replicas)
            + self._members.num_bytes()
        )

    # --- the parts ----------------------------------------------------------------------------

    def _hold_upper(self, hold: _Hold, upper: Node[_Hold]) -> _Hold:
        """A node was split: its upper half is as recent as itself, but goes after it."""
        above = _Hold(hold.replica, upper)
        _link_before(above, hold.newer)
        self._num_holds += 1
        return above

    def _evict(self, replica: _Replica) -> None:
        """Of the least recently used node, as much from its end as has to go."""
        node = replica.ring.newer.node
        assert node is not None
        over = replica.num_blocks - replica.capacity
        if over < len(node.edge):
            self._tree.split(node, len(node.edge) - over)  # `node` is the lower half now
        self._drop(replica.ring.newer)

    def _drop(self, hold: _Hold) -> None:
        node, replica = hold.node, hold.replica
        assert node is not None
        assert node.parent is not None
        _unlink(hold)
        self._num_holds -= 1
        replica.num_blocks -= len(node.edge)
        parent = node.parent
        self._tree.leave(node, replica.member)
        self._fuse(parent)

    def _fuse(self, node: Node[_Hold]) -> None:
        """Undo a split that nothing remembers: an only child, held by the same, each time used as one."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.members != node.members:
            return
        if all([child.records[member].newer is hold for member, hold in node.records.items()]):
            for hold in node.records.values():
                _unlink(hold)
            self._num_holds -= len(node.records)
            self._tree.fuse(node)

    def _let_go(self) -> None:
        left = LEAVING_PER_CALL
        while self._leaving and left:
            replica = self._leaving[0]
            while left and replica.ring.newer is not replica.ring:
                self._drop(replica.ring.newer)
                left -= 1
            if replica.ring.newer is replica.ring:
                self._leaving.popleft()
                self._members.free(replica.member)


def _unlink(hold: _Hold) -> None:
    hold.older.newer = hold.newer
    hold.newer.older = hold.older


def _link_before(hold: _Hold, newer: _Hold) -> None:
    """Between `newer` and what was used before it."""
    hold.older, hold.newer = newer.older, newer
    hold.older.newer = newer.older = hold
