"""What a cache announces, made into numbered batches and snapshots of it.

Knows hashes, and where they are; knows neither bytes nor loads' meaning.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from cache.block_hash import hint
from cache.events import FORMAT_VERSION, MAX_CHANGES_PER_BATCH, Digest, EventBatch, Load, Snapshot, as_hints
from cache.types import BlockHash, HashHint


class EventLog:
    """The engine's side: turns the cache's announcements into numbered, net batches.

    A `TierEventSink`. Owned by the engine thread; what it returns is immutable and may go anywhere.
    Changes wait until `flush` and are in no snapshot before: `snapshot` shows the cache as of the
    last batch, so a subscriber that applies it and then later batches sees every change once.
    """

    def __init__(self, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        """epoch: names this life of the cache; unlike any earlier one of this replica, 64 bits."""
        self.epoch = epoch
        self._clock = clock
        self.seq = 0  # of the last batch flushed
        self.digest = self.host_digest = Digest()  # of `_published`, and of what of it is hosted
        # As of `seq`: whether host memory alone holds it. In an order with parents before children.
        self._published: dict[HashHint, bool] = {}
        # Block hashes held now per hint, and those of them that host memory alone holds: two of them may
        # share their low 64 bits, by chance or malice, and the hint must stay until both are gone.
        self._num_hashes: dict[HashHint, int] = {}
        self._num_hosted: dict[HashHint, int] = {}
        # What differs from `_published`, and where it is now; None = nowhere. In order of the last change, so
        # that (since the cache keeps parents of what it keeps) stored parents precede children, and what has
        # left the pool or the cache follows them.
        self._changed: dict[HashHint, bool | None] = {}

    # `TierEventSink`; each O(1).

    def stored(self, block_hash: BlockHash) -> None:
        """The first copy of `block_hash` is in the pool, and host memory has none."""
        name = hint(block_hash)
        self._num_hashes[name] = self._num_hashes.get(name, 0) + 1
        self._note(name)

    def removed(self, block_hash: BlockHash) -> None:
        """The last copy of `block_hash` has left the pool, and host memory has none."""
        name = hint(block_hash)
        _count_down(self._num_hashes, name)
        self._note(name)

    def demoted(self, block_hash: BlockHash) -> None:
        """It has left the pool and is in host memory."""
        name = hint(block_hash)
        self._num_hosted[name] = self._num_hosted.get(name, 0) + 1
        self._note(name)

    def promoted(self, block_hash: BlockHash) -> None:
        """It was in host memory alone and is in the pool."""
        name = hint(block_hash)
        _count_down(self._num_hosted, name)
        self._note(name)

    def dropped(self, block_hash: BlockHash) -> None:
        """It was in host memory alone and is gone."""
        name = hint(block_hash)
        _count_down(self._num_hosted, name)
        _count_down(self._num_hashes, name)
        self._note(name)

    @property
    def has_changes(self) -> bool:
        """Whether the next batch would say more than a heartbeat."""
        return bool(self._changed)

    def flush(self, load: Load) -> EventBatch:
        """The next batch: the changes since the last one, or a heartbeat. O(changes).

        A change too large for one batch goes in several: `has_changes` stays true. Removals go first,
        so that a cut leaves no child without its parent at the subscriber, in the pool or over both tiers.
        """
        removed: list[HashHint] = []
        stored: list[HashHint] = []
        demoted: list[HashHint] = []
        new_hosted: list[HashHint] = []
        for name, is_hosted in self._changed.items():
            if is_hosted is None:
                removed.append(name)
            elif not is_hosted:
                stored.append(name)
            else:
                (demoted if name in self._published else new_hosted).append(name)
        new_hosted.reverse()  # they came children first
        left = MAX_CHANGES_PER_BATCH
        for part in (removed, demoted, stored, new_hosted):
            del part[left:]
            left -= len(part)
        hosted = demoted + new_hosted
        self._publish(removed, stored, hosted)
        self.seq += 1
        return EventBatch(
            version=FORMAT_VERSION,
            epoch=self.epoch,
            seq=self.seq,
            stored=tuple(stored),
            removed=tuple(removed),
            digest=self.digest,
            load=load,
            sent_s=self._clock(),
            hosted=tuple(hosted),
            host_digest=self.host_digest,
        )

    def snapshot(self, load: Load) -> Snapshot:
        """The whole cache as of the last batch; changes nothing. O(cached)."""
        hashes = as_hints(array("Q", self._published))
        hosted = [name for name, is_hosted in self._published.items() if is_hosted]
        packed = as_hints(array("Q", hosted))
        return Snapshot(FORMAT_VERSION, self.epoch, self.seq, hashes, load, self.digest, packed)

    def _note(self, name: HashHint) -> None:
        total = self._num_hashes.get(name, 0)
        now = None if not total else self._num_hosted.get(name, 0) == total
        self._changed.pop(name, None)
        if self._published.get(name) is not now:
            self._changed[name] = now

    def _publish(
        self, removed: Sequence[HashHint], stored: Sequence[HashHint], hosted: Sequence[HashHint]
    ) -> None:
        published = self._published
        new = [name for name in (*stored, *hosted) if name not in published]
        unhosted = [name for name in (*removed, *stored) if published.get(name)]
        self.digest = self.digest.changed(new, removed)
        self.host_digest = self.host_digest.changed(hosted, unhosted)
        for name in removed:
            del published[name]
        published.update(dict.fromkeys(stored, False))
        published.update(dict.fromkeys(hosted, True))
        for name in (*removed, *stored, *hosted):
            del self._changed[name]


def _count_down(counts: dict[HashHint, int], name: HashHint) -> None:
    """One less; what is zero is not kept."""
    if counts[name] > 1:
        counts[name] -= 1
    else:
        del counts[name]
