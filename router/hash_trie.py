"""Which replica holds which prefix: an implicit trie over chained block hashes.

A block hash names its whole prefix, so a dictionary `hint -> set of replicas` *is* the trie, and a
prompt is matched by jumping along its chain of hints while somebody still holds it. Jumping is exact
only while each replica's entries are **closed under parents**: whoever holds a block holds the blocks
before it. Two kinds of entries keep that promise, each by itself, and so does their union:

    exact      what the replica's events say. Closed because the engine evicts leaves first and its
               batches are net: after a whole batch the set is the engine's own.
    predicted  what a routed prompt will leave there, for a few seconds. One prediction covers its chain
               to the end with one expiry, so whatever else covers a block covers its parents too.
               A prediction leans on the exact blocks it starts after (its *anchor*); if the anchor
               goes, the prediction takes over the blocks below it.

A prediction ends when its expiry passes or when the replica reports its last block: its parents are
exact then. Removals touch exact entries only: one that arrives after the routing speaks of the time
before it, for the engine has yet to compute that prompt.

Knows 64-bit hints and replica names; knows neither tokens, load nor sockets.
Owner: the router's event loop; not thread-safe.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cache.events import Digest
from cache.types import HashHint, ReplicaId

_INT_BYTES = 36  # of a 64-bit Python int: hints are spread over all 64 bits


class _Prediction(NamedTuple):
    chain: tuple[HashHint, ...]  # parent first, from block 0
    start: int  # counted blocks are [start, len(chain)); those before are exact


class _Replica:
    """One replica's entries. Written by `HashTrie` alone."""

    __slots__ = (
        "anchors",
        "bit",
        "counts",
        "exact",
        "expiry",
        "num_chained",
        "predictions",
        "replica_id",
        "xor",
    )

    def __init__(self, replica_id: ReplicaId, bit: int) -> None:
        self.replica_id = replica_id
        self.bit = bit
        self.exact: set[HashHint] = set()
        self.xor = 0
        # A prediction is named by its last hint, which names the whole chain: twins share one.
        self.predictions: dict[HashHint, _Prediction] = {}
        self.expiry: OrderedDict[HashHint, float] = OrderedDict()  # last hint -> when; soonest first
        self.counts: dict[HashHint, int] = {}  # block -> predictions that cover it
        self.anchors: dict[HashHint, set[HashHint]] = {}  # exact block -> predictions that lean on it
        self.num_chained = 0  # hints referenced by `predictions`, for the byte gauge


class HashTrie:
    """`hint -> bitmask of replicas`, exact and predicted. See the module's text for its law."""

    def __init__(self, max_predicted_blocks: int = 1 << 20) -> None:
        """max_predicted_blocks: of one replica; beyond it the oldest predictions end early."""
        self._max_predicted_blocks = max_predicted_blocks
        self._holders: dict[HashHint, int] = {}
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._by_bit: dict[int, _Replica] = {}
        self._free_bits: list[int] = []

    # --- membership ---------------------------------------------------------------------------

    def add_replica(self, replica_id: ReplicaId) -> None:
        """Give the replica a bit; no entries yet. Nothing happens if it is known."""
        if replica_id in self._replicas:
            return
        # Reused bits keep the masks as narrow as the fleet, however many replicas have come and gone.
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._replicas)
        replica = _Replica(replica_id, bit)
        self._replicas[replica_id] = replica
        self._by_bit[bit] = replica

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Forget the replica and every entry of it. Nothing happens if it is unknown. O(its entries)."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        self._clear(replica, replica.exact)
        self._clear(replica, replica.counts)
        del self._replicas[replica_id]
        del self._by_bit[replica.bit]
        self._free_bits.append(replica.bit)

    # --- exact entries ------------------------------------------------------------------------

    def store(self, replica_id: ReplicaId, hints: Iterable[HashHint]) -> None:
        """The replica has cached these blocks. Known ones are ignored; predictions they complete end."""
        replica = self._replicas[replica_id]
        holders, bit, exact, predictions = self._holders, replica.bit, replica.exact, replica.predictions
        xor = replica.xor
        complete = []
        for hint in hints:
            if hint in exact:
                continue
            exact.add(hint)
            xor ^= hint
            holders[hint] = holders.get(hint, 0) | bit
            if hint in predictions:
                complete.append(hint)
        replica.xor = xor
        # Only now: within a batch a chain's last block may be named before its first.
        for last in complete:
            self._retire(replica, last)

    def remove(self, replica_id: ReplicaId, hints: Iterable[HashHint]) -> None:
        """The replica has evicted these blocks. Unknown ones are ignored."""
        replica = self._replicas[replica_id]
        exact, anchors = replica.exact, replica.anchors
        for hint in hints:
            if hint not in exact:
                continue
            if hint in anchors:
                self._take_over(replica, hint)
            exact.remove(hint)
            replica.xor ^= hint
            if hint not in replica.counts:
                self._unset(hint, replica.bit)

    def replace(self, replica_id: ReplicaId, hints: Iterable[HashHint]) -> None:
        """The replica's cache holds these blocks and no others (a snapshot). Predictions stay."""
        replica = self._replicas[replica_id]
        wanted = set(hints)
        self.remove(replica_id, replica.exact - wanted)
        self.store(replica_id, wanted)

    # --- predicted entries --------------------------------------------------------------------

    def predict(self, replica_id: ReplicaId, hints: Sequence[HashHint], expires_at: float) -> None:
        """A prompt of these full blocks was routed there: count them as held until `expires_at`.

        Predictions end in the order they were made: `expires_at` must not fall from call to call. O(blocks
        the replica does not hold yet); a twin of a live prediction only renews it.
        """
        replica = self._replicas[replica_id]
        if not hints or hints[-1] in replica.exact:
            return
        last = hints[-1]
        if last in replica.predictions:
            replica.expiry[last] = expires_at
            replica.expiry.move_to_end(last)
            return
        start = _num_leading(hints, replica.exact)
        prediction = _Prediction(tuple(hints), start)
        replica.predictions[last] = prediction
        replica.expiry[last] = expires_at
        replica.num_chained += len(hints)
        if start:
            replica.anchors.setdefault(hints[start - 1], set()).add(last)
        self._cover(replica, prediction.chain[start:])
        while len(replica.counts) > self._max_predicted_blocks:
            self._retire(replica, next(iter(replica.expiry)))

    def retract(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> None:
        """The prompt will not be computed there after all: end its prediction, if there is one.

        What events have said stays. Nothing happens for an unknown replica. O(blocks dropped).
        """
        replica = self._replicas.get(replica_id)
        if replica is not None and hints and hints[-1] in replica.predictions:
            self._retire(replica, hints[-1])

    def expire(self, now: float) -> None:
        """End predictions whose time has passed. O(replicas + blocks dropped)."""
        for replica in self._replicas.values():
            expiry = replica.expiry
            while expiry:
                last = next(iter(expiry))
                if expiry[last] > now:
                    break
                self._retire(replica, last)

    # --- questions ----------------------------------------------------------------------------

    def match(self, hints: Sequence[HashHint]) -> dict[ReplicaId, int]:
        """Leading blocks each replica already holds; replicas that hold none are left out.

        hints: chain of one prompt's full blocks, parent first.
        Changes nothing; one pass for all replicas together: O(distinct depths * log(blocks)) look-ups.
        """
        found: dict[ReplicaId, int] = {}
        end = len(hints)
        if not end:
            return found
        held = self._holders.get
        alive = held(hints[0], 0)
        depth = 0  # every bit of `alive` holds block `depth`
        while alive:
            # The first block that somebody alive does not hold lies in (depth, end].
            depth = self._first_loss(hints, depth, alive)
            still = alive & held(hints[depth], 0) if depth < end else 0
            lost = alive ^ still
            while lost:
                bit = lost & -lost
                found[self._by_bit[bit].replica_id] = depth
                lost ^= bit
            alive = still
        return found

    def num_exact(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> int:
        """Leading blocks that the replica itself has said it holds, predictions left out. O(log(blocks))."""
        return _num_leading(hints, self._replicas[replica_id].exact)

    def digest(self, replica_id: ReplicaId) -> Digest:
        """Of the replica's exact entries, to compare with what it says of its cache. O(1)."""
        replica = self._replicas[replica_id]
        return Digest(len(replica.exact), replica.xor)

    def num_blocks(self, replica_id: ReplicaId) -> int:
        """Exact entries of one replica. O(1)."""
        return len(self._replicas[replica_id].exact)

    @property
    def num_entries(self) -> int:
        """Distinct blocks that somebody holds or is predicted to hold."""
        return len(self._holders)

    def num_bytes(self) -> int:
        """Memory the index takes, in bytes, within a few percent. O(replicas)."""
        widest = max(self._by_bit, default=0)
        # Python keeps one object for each small int; wider masks are objects of their own.
        mask_bytes = sys.getsizeof(widest) if widest > 128 else 0
        total = sys.getsizeof(self._holders) + mask_bytes * len(self._holders)
        for replica in self._replicas.values():
            total += sys.getsizeof(replica.exact) + _INT_BYTES * len(replica.exact)
            total += sys.getsizeof(replica.counts) + sys.getsizeof(replica.expiry)
            # A chain's tuple and, at worst, hints nobody else refers to.
            total += replica.num_chained * (8 + _INT_BYTES) + 200 * len(replica.predictions)
        return total

    # --- the parts ----------------------------------------------------------------------------

    def _first_loss(self, hints: Sequence[HashHint], depth: int, alive: int) -> int:
        """First index beyond `depth` whose block is not held by all of `alive`; len(hints) if none."""
        held = self._holders.get
        low, high = depth, len(hints)  # all hold `low`; at `high` somebody may not
        if low + 1 < high and held(hints[high - 1], 0) & alive == alive:
            return high  # the whole prompt: a repeated question
        step = 1
        while low + step < high:  # most matches end early or in one long shared prefix
            if held(hints[low + step], 0) & alive != alive:
                high = low + step
                break
            low += step
            step *= 2
        while low + 1 < high:
            middle = (low + high) // 2
            if held(hints[middle], 0) & alive == alive:
                low = middle
            else:
                high = middle
        return high

    def _cover(self, replica: _Replica, chain: Sequence[HashHint]) -> None:
        counts, holders, bit = replica.counts, self._holders, replica.bit
        for hint in chain:
            covered = counts.get(hint)
            if covered is None:
                counts[hint] = 1
                holders[hint] = holders.get(hint, 0) | bit
            else:
                counts[hint] = covered + 1

    def _retire(self, replica: _Replica, last: HashHint) -> None:
        """End one prediction, tail first, so that the entries stay closed at every moment."""
        chain, start = replica.predictions.pop(last)
        del replica.expiry[last]
        replica.num_chained -= len(chain)
        if start:
            self._weigh_anchor(replica, chain[start - 1], last)
        counts, exact, bit = replica.counts, replica.exact, replica.bit
        for index in range(len(chain) - 1, start - 1, -1):
            hint = chain[index]
            covered = counts[hint]
            if covered > 1:
                counts[hint] = covered - 1
                continue
            del counts[hint]
            if hint not in exact:
                self._unset(hint, bit)

    def _take_over(self, replica: _Replica, anchor: HashHint) -> None:
        """`anchor` is about to go: predictions that lean on it cover the blocks below it themselves."""
        for last in replica.anchors.pop(anchor):
            chain, start = replica.predictions[last]
            replica.predictions[last] = _Prediction(chain, 0)
            self._cover(replica, chain[:start])

    @staticmethod
    def _weigh_anchor(replica: _Replica, anchor: HashHint, last: HashHint) -> None:
        leaning = replica.anchors[anchor]
        leaning.discard(last)
        if not leaning:
            del replica.anchors[anchor]

    def _clear(self, replica: _Replica, hints: Iterable[HashHint]) -> None:
        for hint in hints:
            self._unset(hint, replica.bit)

    def _unset(self, hint: HashHint, bit: int) -> None:
        left = self._holders.get(hint, 0) & ~bit
        if left:
            self._holders[hint] = left
        else:
            self._holders.pop(hint, None)


def _num_leading(hints: Sequence[HashHint], exact: set[HashHint]) -> int:
    """Leading hints that are in `exact`, which is closed under parents. O(log(hints))."""
    low, high = 0, len(hints)
    while low < high:
        middle = (low + high) // 2
        if hints[middle] in exact:
            low = middle + 1
        else:
            high = middle
    return low
