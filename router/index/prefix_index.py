"""Which replica holds how many leading blocks of a prompt, whatever the replica tells of its cache.

    tells its blocks     exact entries from its events, and predictions of what was just routed (`HashTrie`)
    tells none           its cache imitated from what was sent there and what came back (`ApproximateTrie`)

Knows hints, request ids and replicas; knows neither load nor decisions. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from cache.events import Digest, EventBatch, Snapshot
from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.index.approximate_trie import ApproximateTrie
from router.index.expectations import Expectations
from router.index.hash_trie import HashTrie
from router.index.snapshot_slices import replace_in_slices


class PrefixIndex:
    """The exact and the imitated caches of all replicas whose hashes this router can read."""

    def __init__(self, predicted_ttl_s: float) -> None:
        """predicted_ttl_s: seconds a prediction lasts unless events confirm it before."""
        self._exact = HashTrie()
        self._approximate = ApproximateTrie()
        self._expectations = Expectations(self._exact, predicted_ttl_s)
        self._followed: set[ReplicaId] = set()  # those with exact entries
        self._served_by: dict[RequestId, ReplicaId] = {}  # imitated replicas, until the output is known

    # --- membership ---------------------------------------------------------------------------

    def add_replica(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        """It holds nothing yet. Nothing happens if it is known."""
        if info.has_kv_events:
            self._exact.add_replica(replica_id)
            self._followed.add(replica_id)
        else:
            self._approximate.add_replica(replica_id, info.num_blocks)

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """It matches nobody from now on. Nothing happens if it is unknown."""
        self._followed.discard(replica_id)
        self._exact.remove_replica(replica_id)
        self._approximate.remove_replica(replica_id)

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._followed or replica_id in self._approximate

    # --- what a request leaves behind ---------------------------------------------------------

    def expect(
        self, request_id: RequestId, replica_id: ReplicaId, hints: Sequence[HashHint], now: float
    ) -> None:
        """Its prompt was sent there, and nowhere else any more. To a replica not in the index: nowhere."""
        if replica_id in self._followed:
            self._expectations.expect(request_id, replica_id, hints, now)
            return
        self._expectations.drop(request_id)
        if replica_id in self._approximate:
            self._approximate.insert(replica_id, hints)

    def keep(self, request_id: RequestId) -> None:
        """Its prompt has been computed."""
        self._expectations.keep(request_id)

    def drop(self, request_id: RequestId) -> None:
        """Its prompt will not be computed where it was expected. An imitated cache keeps it until it ages."""
        self._expectations.drop(request_id)

    def served(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """That replica computed for it last; `finish` must follow."""
        if replica_id in self._approximate:
            self._served_by[request_id] = replica_id

    def finish(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:
        """The request is over. hints: of all full blocks of prompt and output, () if unknown."""
        replica_id = self._served_by.pop(request_id, None)
        if replica_id is not None and replica_id in self._approximate:
            self._approximate.insert(replica_id, hints)

    def expire(self, now: float) -> None:
        """End predictions whose time has passed."""
        self._exact.expire(now)

    # --- what replicas say --------------------------------------------------------------------

    def apply(self, replica_id: ReplicaId, batch: EventBatch) -> Digest | None:
        """Follow a replica's cache. The digest of what is now indexed of what it has told; None: unknown.

        Raises KeyError for a replica not in the index.
        """
        if replica_id in self._followed:
            # While answers grow nothing changes in most batches, and what is not touched stays uncached.
            if batch.removed:
                self._exact.remove(replica_id, batch.removed)
            if batch.hosted:
                self._exact.host(replica_id, batch.hosted)
            if batch.stored:
                self._exact.store(replica_id, batch.stored)
            self._exact.sweep()
            self._check_host(replica_id, batch.host_digest)
            if self._exact.digest(replica_id) is None:
                self._exact.believe(replica_id, batch.digest)
        return self.digest(replica_id)

    def apply_in_slices(self, replica_id: ReplicaId, snapshot: Snapshot) -> Generator[None, None, None]:
        """`apply` of a snapshot, one slice with each step. Close it if the replica leaves before."""
        if replica_id in self._followed:
            yield from replace_in_slices(self._exact, replica_id, snapshot)

    def forget(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        """What is known of its cache is not to be trusted: start anew."""
        self.remove_replica(replica_id)
        self.add_replica(replica_id, info)

    def _check_host(self, replica_id: ReplicaId, told: Digest) -> None:
        """Of a replica whose tiers have drifted nothing is known: its digest is then another than it told."""
        known = self._exact.host_digest(replica_id)
        if known is not None and known != told:
            self._exact.remove_replica(replica_id)
            self._exact.add_replica(replica_id)

    # --- questions ----------------------------------------------------------------------------

    def match(self, hints: Sequence[HashHint]) -> dict[ReplicaId, int]:
        """Leading blocks each replica holds; those that hold none are left out. See `HashTrie.match`."""
        held = self._exact.match(hints)
        if self._approximate.num_replicas:
            held.update(self._approximate.match(hints))
        return held

    def match_pools(self, hints: Sequence[HashHint]) -> dict[ReplicaId, int]:
        """Of each replica with host memory, the leading blocks that need no copying. See `HashTrie`."""
        return self._exact.match_pools(hints)

    def num_exact(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> int:
        """Leading blocks that the replica itself has said it holds; 0 for one that tells nothing."""
        return self._exact.num_exact(replica_id, hints) if replica_id in self._followed else 0

    def is_there(self, replica_id: ReplicaId, hints: Sequence[HashHint], index: int) -> bool:
        """Whether that block of a prompt, which `match` counts, is more than expected. One that tells nothing
        is taken at its imitation's word."""
        return replica_id not in self._followed or self._exact.num_exact(replica_id, hints) > index

    def num_blocks(self, replica_id: ReplicaId) -> int:
        """Blocks that one replica holds by its events, or probably; 0 for one not in the index. O(1)."""
        if replica_id in self._followed:
            return self._exact.num_blocks(replica_id)
        return self._approximate.num_blocks(replica_id) if replica_id in self._approximate else 0

    def digest(self, replica_id: ReplicaId) -> Digest | None:
        """Of what the replica has announced; None: unknown. O(1). Raises KeyError for one not indexed."""
        return Digest() if replica_id in self._approximate else self._exact.digest(replica_id)

    @property
    def num_entries(self) -> int:
        """Distinct blocks that somebody holds, exactly, by prediction or by imitation."""
        return self._exact.num_entries + self._approximate.num_entries

    @property
    def num_refused(self) -> int:
        """Blocks that replicas hold and the index has no room for. O(replicas)."""
        return self._exact.num_refused

    def num_bytes(self) -> int:
        """Memory the index takes, in bytes, within a few percent. O(1)."""
        return self._exact.num_bytes() + self._approximate.num_bytes()
