"""Which replica holds which prefix: an implicit trie over chained block hashes.

A block hash names its whole prefix, so a table `hint -> set of replicas` *is* the trie, and a prompt is
matched by jumping along its chain of hints: by bisection, for sets only shrink along it. That is exact while
each replica's entries are **closed under parents**: whoever holds a block holds the blocks before it. Two
kinds of entries keep that promise, each by itself, and so does their union:

    exact      what the replica's events say (`packed_table.py`). Closed because the engine evicts leaves
               first and its batches are net: after a whole batch the set is the engine's own.
    predicted  what a routed prompt will leave there, for a few seconds (`predictions.py`). Closed because a
               prediction is a whole chain, from block 0.

A prediction ends when its expiry passes or when the replica reports its last block: its parents are
exact then. Removals touch exact entries only: one that arrives after the routing speaks of the time
before it, for the engine has yet to compute that prompt.

A replica may hold blocks in host memory too, behind its pool. From the first one on it has a second number in
the table: of what lies in the pool, closed under parents by itself; the first is of everything it holds. Two
bits a block, one match for both, and a replica without host memory costs nothing.

Exact entries are bounded by `max_blocks`. What a replica stores beyond that is *refused*: its digest
counts it, so that the replica's own agrees, but it matches nobody; such a replica's set is a subset of its
cache, and a match may then jump over a block that is missing here but not there.

A replica that leaves matches nobody from that moment. Its entries are swept out over the next calls, a few
segments of the table at a time, and its number is given out again when the last one has gone.

Knows 64-bit hints and replica names; knows neither tokens, load nor sockets. Its evidence: docs/design/005.
Owner: the router's event loop; not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from cache.events import Digest, digest_of
from cache.types import HashHint, ReplicaId
from router.index.departed import Departed
from router.index.members import Members, numbers
from router.index.packed_table import WORD_BITS, PackedTable
from router.index.predictions import Predictions

MAX_BLOCKS = 1 << 24  # a thousand caches of 16,000 blocks; half a gigabyte, taken as it fills
REPLICA_BYTES = 300
MAX_PARTINGS = 1024
PARTING_BYTES = 200


class _Replica:
    """One replica's number and what it has announced. Written by `HashTrie` alone."""

    __slots__ = (
        "count",
        "is_sure",
        "member",
        "num_refused",
        "pool_digest",
        "pool_member",
        "replica_id",
        "xor",
    )

    def __init__(self, replica_id: ReplicaId, member: int) -> None:
        self.replica_id = replica_id
        self.member = member  # its number in the table and in the predictions
        self.count = 0  # blocks it has stored and not removed
        self.xor = 0  # of their hints
        self.num_refused = 0  # of those, for which the table had no room
        # Of what lies in its pool: number and digest. None: all of it does.
        self.pool_member: int | None = None
        self.pool_digest = Digest()
        self.is_sure = True  # that both digests are right: nobody knows in which tier a refused block lies

    @property
    def members(self) -> int:
        """Both numbers, as a bit set."""
        return 1 << self.member | (1 << self.pool_member if self.pool_member is not None else 0)


class HashTrie:
    """`hint -> set of replicas`, exact and predicted. See the module's text for its law."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_predicted_blocks: int = 1 << 20) -> None:
        """max_blocks: distinct exact blocks, of all replicas together; address space is reserved for them.
        max_predicted_blocks: of one replica; beyond it the oldest predictions end early.
        """
        self._table = PackedTable(max_blocks)
        self._predictions = Predictions(max_predicted_blocks)
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._members = Members()
        self._pool_owners: dict[int, ReplicaId] = {}  # second number -> whose
        self._pool_members = 0  # these, as a bit set
        self._departed = Departed(self._table, self._predictions, self._members)
        # First hint -> of its latest match, the least depth and the blocks that nobody held.
        self._partings: dict[HashHint, tuple[int, int]] = {}
        # The chain matched last and who holds how much of it exactly, while no entry has changed since.
        self._latest: tuple[Sequence[HashHint], list[tuple[int, int]]] | None = None

    # --- membership ---------------------------------------------------------------------------

    def add_replica(self, replica_id: ReplicaId, *, is_live: bool = True) -> None:
        """Give the replica a number; no entries yet. Nothing happens if it is known. is_live: what it holds
        is matched, and not only from the moment that it succeeds another."""
        if replica_id in self._replicas:
            return
        if not self._members.has_free and self._members.num_numbers % WORD_BITS == 0:
            self._departed.free_a_number()  # another number would cost 8 bytes a slot
        self._replicas[replica_id] = _Replica(replica_id, self._members.add(replica_id, is_live=is_live))

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Forget the replica and every entry of it. Nothing happens if it is unknown.

        It matches nobody at once; large tables are swept over the next calls. O(1), and at most so much.
        """
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        self._latest = None
        self._members.remove(replica.member)
        if replica.pool_member is not None:
            del self._pool_owners[replica.pool_member]
            self._pool_members ^= 1 << replica.pool_member
        self._predictions.forget(replica.member)
        self._departed.leave(replica.members)

    def succeed(self, successor_id: ReplicaId, replica_id: ReplicaId) -> None:
        """What `successor_id` holds is what `replica_id` holds from now on; the successor's name is gone.

        What was known of `replica_id` goes as in `remove_replica`, predictions included. O(1), both known.
        """
        successor = self._replicas[successor_id]
        self.remove_replica(replica_id)
        del self._replicas[successor_id]
        successor.replica_id = replica_id
        self._replicas[replica_id] = successor
        self._members.rename(successor.member, replica_id)
        if successor.pool_member is not None:
            self._pool_owners[successor.pool_member] = replica_id

    def sweep(self) -> None:
        """A share of any sweep, as with every call that changes something: for calls that change nothing."""
        self._departed.sweep()

    # --- exact entries ------------------------------------------------------------------------

    def store(self, replica_id: ReplicaId, hints: Iterable[HashHint]) -> None:
        """The replica has these blocks in its pool. Known ones are ignored; predictions they complete end.

        O(hints): a thousand in less than half a millisecond.
        """
        replica = self._replicas[replica_id]
        hints = _sequence(hints)
        self._hold(replica, hints)
        if replica.pool_member is not None:
            self._pool(replica, hints)
        self._complete(replica.member, hints)
        self._departed.sweep()

    def host(self, replica_id: ReplicaId, hints: Iterable[HashHint]) -> None:
        """The replica has these blocks in host memory and not in its pool. O(hints), and the first time
        O(blocks) to tell the two apart."""
        replica = self._replicas[replica_id]
        hints = _sequence(hints)
        if not hints:
            return
        if replica.pool_member is None:
            self._tell_apart(replica)
        assert replica.pool_member is not None
        self._hold(replica, hints)
        self._unpool(replica, hints)
        self._departed.sweep()

    def _hold(self, replica: _Replica, hints: Sequence[HashHint]) -> None:
        """It has these, wherever."""
        self._latest = None
        added, refused = self._table.add(hints, replica.member)
        replica.count += added.num_hints + refused.num_hints
        replica.xor ^= added.xor ^ refused.xor
        replica.num_refused += refused.num_hints

    def _tell_apart(self, replica: _Replica) -> None:
        """Give it a number for its pool, where everything that it holds lies until now."""
        member = self._members.add_unnamed()
        replica.pool_member, replica.pool_digest = member, Digest(replica.count, replica.xor)
        self._pool_owners[member] = replica.replica_id
        self._pool_members |= 1 << member
        replica.is_sure = not replica.num_refused
        self._table.add(self._table.hints_of(replica.member), member)

    def _pool(self, replica: _Replica, hints: Sequence[HashHint]) -> None:
        """These, which it holds, lie in its pool now."""
        assert replica.pool_member is not None
        if replica.num_refused:
            replica.is_sure = False
            hints = [each for each in hints if self._table.get(each) >> replica.member & 1]
        added, _ = self._table.add(hints, replica.pool_member)
        old = replica.pool_digest
        replica.pool_digest = Digest(old.count + added.num_hints, old.xor ^ added.xor)

    def _unpool(self, replica: _Replica, hints: Sequence[HashHint]) -> None:
        """These lie in its pool no more."""
        assert replica.pool_member is not None
        replica.is_sure &= not replica.num_refused
        gone, _ = self._table.discard(hints, replica.pool_member)
        old = replica.pool_digest
        replica.pool_digest = Digest(old.count - gone.num_hints, old.xor ^ gone.xor)

    def remove(self, replica_id: ReplicaId, hints: Iterable[HashHint]) -> None:
        """The replica has evicted these blocks. Unknown ones are ignored. O(hints)."""
        replica = self._replicas[replica_id]
        self._latest = None
        hints = _sequence(hints)
        if replica.pool_member is not None:
            self._unpool(replica, hints)
        gone, unknown = self._table.discard(hints, replica.member)
        replica.count -= gone.num_hints
        replica.xor ^= gone.xor
        if replica.num_refused:  # then what is not here was refused
            replica.count -= unknown.num_hints
            replica.xor ^= unknown.xor
            replica.num_refused = max(0, replica.num_refused - unknown.num_hints)
        self._departed.sweep()

    def replace(
        self, replica_id: ReplicaId, hints: Iterable[HashHint], hosted: Sequence[HashHint] = ()
    ) -> None:
        """The replica holds these blocks and no others (a snapshot). Predictions stay.

        hosted: of these, those that are in host memory and not in its pool.

        O(blocks) if the replica has entries, else O(hints): about 5 ms for a million blocks.
        """
        replica = self._replicas[replica_id]
        self._latest = None
        hints = list(dict.fromkeys(hints))
        if replica.count:
            held = self._table.hints_of(replica.member)
            wanted = np.array(hints, np.uint64)
            self._table.discard(held[~np.isin(held, wanted, assume_unique=True)], replica.member)
        _, refused = self._table.add(hints, replica.member)
        digest = digest_of(hints)
        replica.count, replica.xor, replica.num_refused = digest.count, digest.xor, refused.num_hints
        if replica.pool_member is not None:
            self._table.discard(self._table.hints_of(replica.pool_member), replica.pool_member)
            replica.pool_digest, replica.is_sure = Digest(), True
            self._pool(replica, hints)
        self.host(replica_id, hosted)
        self._complete(replica.member, hints)

    # --- predicted entries --------------------------------------------------------------------

    def predict(self, replica_id: ReplicaId, hints: Sequence[HashHint], expires_at: float) -> None:
        """A prompt of these full blocks was routed there: count them as held until `expires_at`.

        Predictions end in the order they were made: `expires_at` must not fall from call to call. A twin of a
        live prediction renews it. O(branches on its path * log(blocks)), and a copy of the new hints.
        """
        member = self._replicas[replica_id].member
        if hints and not self._table.get(hints[-1]) >> member & 1:
            self._predictions.predict(member, hints, expires_at)

    def retract(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> None:
        """The prompt will not be computed there after all: end its prediction, if there is one.

        What events have said stays. Nothing happens for an unknown replica.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None and hints and self._predictions.has(replica.member, hints[-1]):
            self._predictions.end(replica.member, hints[-1])

    def expire(self, now: float) -> None:
        """End predictions whose time has passed. O(those), and a share of any sweep."""
        self._predictions.expire(now)
        self._departed.sweep()

    # --- questions ----------------------------------------------------------------------------

    def match(self, hints: Sequence[HashHint]) -> dict[ReplicaId, int]:
        """Leading blocks each replica already holds; replicas that hold none are left out.

        hints: chain of one prompt's full blocks, parent first.
        Changes no answer; one pass for all replicas together: O(distinct depths * log(blocks)) look-ups.
        """
        if not hints:
            return {}
        # Prompts that begin alike (with one system prompt) mostly part from others at the same place, and
        # are new in their last so many blocks: exactly as many, or give or take a factor of two.
        beginning = hints[0]
        parting, num_new = self._partings.get(beginning, (0, 0))
        new_at = len(hints) - num_new
        guesses = (parting - 1, parting, new_at - 1, new_at, new_at - num_new)
        groups = self._table.depths(hints, self._members.live | self._pool_members, guesses)
        self._latest = hints, groups
        if groups:
            if len(self._partings) >= MAX_PARTINGS:
                self._partings.clear()
            self._partings[beginning] = groups[0][0], len(hints) - groups[-1][0]
        if self._pool_members:
            groups = _among(groups, self._members.live)
        predicted = self._predictions.match(hints, self._members.live)
        if predicted:
            groups = sorted(groups + _deeper(predicted, groups))
        return self._members.depths(groups)

    def match_pools(self, hints: Sequence[HashHint]) -> dict[ReplicaId, int]:
        """Of each replica that has told of host memory, the leading blocks that lie in its pool, or will as
        predicted; 0 for none. What `match` finds beyond that has to be copied back.

        O(1) while there is none; else O(those replicas) right after these hints were matched.
        """
        if not self._pool_members or not hints:
            return {}
        if self._latest is None or self._latest[0] is not hints:
            self.match(hints)
        assert self._latest is not None
        found = dict.fromkeys(self._pool_owners.values(), 0)
        for depth, members in _among(self._latest[1], self._pool_members):
            for member in numbers(members):
                found[self._pool_owners[member]] = depth
        owners = 0
        for replica_id in found:
            owners |= 1 << self._replicas[replica_id].member
        for depth, members in self._predictions.match(hints, owners):
            for replica_id in self._members.names(members):
                found[replica_id] = max(found[replica_id], depth)
        return found

    def num_exact(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> int:
        """Leading blocks that the replica itself has said it holds, predictions left out.

        O(log(blocks)), and O(1) right after these hints were matched.
        """
        if not hints:
            return 0
        member = 1 << self._replicas[replica_id].member
        if self._latest is not None and self._latest[0] is hints:
            groups = self._latest[1]
        else:
            groups = self._table.depths(hints, member)
        return next((depth for depth, members in groups if members & member), 0)

    def digest(self, replica_id: ReplicaId) -> Digest | None:
        """Of what the replica has announced, to compare with what it says of its cache; None: the index had
        no room for some blocks, and cannot tell those that come from those that change tiers. O(1)."""
        replica = self._replicas[replica_id]
        is_sure = replica.pool_member is None or replica.is_sure
        return Digest(replica.count, replica.xor) if is_sure else None

    def believe(self, replica_id: ReplicaId, told: Digest) -> None:
        """It holds so much, by its own count; what of that is not here was refused. O(1)."""
        replica = self._replicas[replica_id]
        num_here = replica.count - replica.num_refused
        replica.count, replica.xor = told.count, told.xor
        replica.num_refused = max(0, told.count - num_here)

    def host_digest(self, replica_id: ReplicaId) -> Digest | None:
        """Of what the replica has told to be in host memory alone; None: the index had no room for some
        blocks, and cannot tell. O(1)."""
        replica = self._replicas[replica_id]
        if replica.pool_member is None:
            return Digest()
        pool = replica.pool_digest
        return Digest(replica.count - pool.count, replica.xor ^ pool.xor) if replica.is_sure else None

    def num_blocks(self, replica_id: ReplicaId) -> int:
        """Exact entries of one replica. O(1)."""
        replica = self._replicas[replica_id]
        return replica.count - replica.num_refused

    @property
    def num_refused(self) -> int:
        """Blocks that replicas hold and the index has no room for. O(replicas)."""
        return sum([replica.num_refused for replica in self._replicas.values()])

    @property
    def num_entries(self) -> int:
        """Distinct blocks that somebody holds or is predicted to hold, and what is yet to be swept out.

        O(predictions * log(blocks)).
        """
        return self._table.num_entries + sum(map(self._num_unknown, self._predictions.edges()))

    @property
    def is_sweeping(self) -> bool:
        """Whether entries of replicas that have left are still to be swept out."""
        return self._departed.are_left

    def num_bytes(self) -> int:
        """Memory the index takes, in bytes, within a few percent. O(1)."""
        return (
            self._table.num_bytes()
            + self._predictions.num_bytes()
            + self._members.num_bytes()
            + REPLICA_BYTES * len(self._replicas)
            + PARTING_BYTES * len(self._partings)
        )

    # --- the parts ----------------------------------------------------------------------------

    def _complete(self, member: int, hints: Sequence[HashHint]) -> None:
        """End the predictions whose last block is exact now. O(the fewer of hints and predictions)."""
        predictions, held = self._predictions, self._table.get
        lasts = predictions.lasts(member)
        if not lasts:
            return
        # Only after the whole batch: within it a chain's last block may be named before its first.
        candidates = lasts if len(lasts) < len(hints) else [h for h in dict.fromkeys(hints) if h in lasts]
        for last in [last for last in candidates if held(last) >> member & 1]:
            predictions.end(member, last)

    def _num_unknown(self, edge: Sequence[int]) -> int:
        """Blocks of a run that no replica has announced."""
        held = self._table.get
        low, high = 0, len(edge)
        while low < high:
            middle = (low + high) // 2
            if held(edge[middle]):
                low = middle + 1
            else:
                high = middle
        return len(edge) - low


def _deeper(predicted: list[tuple[int, int]], exact: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of (depth, members) groups, what exceeds those of the other list. Mostly little is left: what is
    predicted again and again is held already."""
    found = []
    for depth, members in predicted:
        for known, holders in exact:
            if known >= depth:
                members &= ~holders
        if members:
            found.append((depth, members))
    return found


def _among(groups: list[tuple[int, int]], wanted: int) -> list[tuple[int, int]]:
    """Of (depth, members) groups, those of some members."""
    return [(depth, members & wanted) for depth, members in groups if members & wanted]


def _sequence(hints: Iterable[HashHint]) -> Sequence[HashHint]:
    return hints if isinstance(hints, list | tuple | array | memoryview) else list(hints)
