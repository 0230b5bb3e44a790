"""A replica's snapshot goes into the index slice by slice: a million blocks at once would take a second, and
no request would be routed, no token passed on, in the meantime.

A snapshot names parents before children, so its first so many hashes are closed under parents, and so is
their union with what was known before: a match in between is as exact as any. What the replica no longer
holds goes last; whether there is any, the digest tells.

Knows the index; knows neither sockets nor event loops: whoever steps the generator decides what runs between.
"""

from __future__ import annotations

from collections.abc import Generator

from cache.events import Snapshot, digest_of
from cache.types import ReplicaId
from router.hash_trie import HashTrie

SLICE_BLOCKS = 1024  # about a millisecond of the event loop


def replace_in_slices(
    trie: HashTrie, replica_id: ReplicaId, snapshot: Snapshot
) -> Generator[None, None, None]:
    """What the index holds of the replica becomes the snapshot. The caller stops if the replica leaves."""
    hashes = snapshot.hashes
    for start in range(0, len(hashes), SLICE_BLOCKS):
        trie.store(replica_id, hashes[start : start + SLICE_BLOCKS])
        yield
    digest = snapshot.digest if snapshot.digest is not None else digest_of(hashes)
    if trie.digest(replica_id) != digest:
        trie.replace(replica_id, hashes)
