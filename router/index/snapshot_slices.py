"""A replica's snapshot goes into the index slice by slice: a million blocks at once would take seconds, and
no request would be routed, no token passed on, in the meantime.

A snapshot names parents before children, so its first so many hashes are closed under parents: a match in
between is exact as far as it goes. If something is known of the replica already, that goes on being matched
while the snapshot is gathered under a name of its own, and then gives way to it at once.

Knows the index; knows neither sockets nor event loops: whoever steps the generator decides what runs between.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator

from cache.events import Snapshot
from cache.types import ReplicaId
from router.index.hash_trie import HashTrie

SLICE_BLOCKS = 512  # about a quarter of a millisecond of the event loop, two where the table grows
SMALL_INDEX_BLOCKS = 1 << 16  # of all replicas: to look through them for one's takes a millisecond

_numbers = itertools.count(1)


def replace_in_slices(
    trie: HashTrie, replica_id: ReplicaId, snapshot: Snapshot
) -> Generator[None, None, None]:
    """What the index holds of the replica becomes the snapshot, after the last step.

    Close it if the replica leaves before: then nothing is left of it.
    """
    is_small = len(snapshot.hashes) <= SLICE_BLOCKS
    if not trie.num_blocks(replica_id):
        yield from _store(trie, replica_id, snapshot)
    elif is_small and trie.num_entries <= SMALL_INDEX_BLOCKS:
        trie.replace(replica_id, snapshot.hashes, snapshot.hosted)  # predictions stay
    else:
        aside = ReplicaId(f"{replica_id}, snapshot {next(_numbers)}")
        trie.add_replica(aside, is_live=False)
        try:
            yield from _store(trie, aside, snapshot)
            trie.succeed(aside, replica_id)
        finally:
            trie.remove_replica(aside)


def _store(trie: HashTrie, replica_id: ReplicaId, snapshot: Snapshot) -> Generator[None, None, None]:
    hashes, hosted = snapshot.hashes, snapshot.hosted
    for start in range(0, len(hashes), SLICE_BLOCKS):
        trie.store(replica_id, hashes[start : start + SLICE_BLOCKS])
        yield
    # Children first: what is left in the pool is closed under parents after each slice.
    for end in range(len(hosted), 0, -SLICE_BLOCKS):
        trie.host(replica_id, hosted[max(0, end - SLICE_BLOCKS) : end])
        yield
