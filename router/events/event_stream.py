"""The order of one replica's events: what to apply, what to hold back, when to ask for a snapshot.

    SYNCING  a snapshot is wanted; live batches wait (the last `max_waiting` of them)
    LIVE     batch seq + 1 of the same epoch is applied; anything else is old, or a reason to resync

A removal cannot be undone by a store that is repeated or late: both are batches, and a batch is applied
once, in its place, or not at all. A snapshot is applied in slices, so that a million blocks do not stop the
event loop: still SYNCING in between, and closed under parents, since parents come first.

A state machine over decoded messages: no sockets, no tasks, time by argument, so that every schedule of
loss, duplication, reordering and restarts can be tested. `router/events/subscriber.py` is its edge.
Owner: the router's event loop.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import closing
from enum import Enum, StrEnum, auto
from typing import Protocol

from cache.events import Digest, EventBatch, Load, LoadUpdate, Snapshot
from cache.types import ReplicaId
from router.events.event_lag import LagCounts, LagMeter


class ResyncReason(StrEnum):
    """Why a snapshot is wanted."""

    JOIN = "join"  # first contact
    GAP = "gap"  # a batch is missing
    EPOCH = "epoch"  # the engine restarted: what we know of it is void
    DRIFT = "drift"  # the digests differ: what we know of it is wrong
    MALFORMED = "malformed"  # a message could not be read, so a batch is missing
    MISMATCH = "mismatch"  # its answers keep finding less in its cache than it had said


class EventSink(Protocol):
    """Where events go: `Routing`. Called on the router's event loop; must not block."""

    def on_events(self, replica_id: ReplicaId, events: EventBatch) -> Digest | None:
        """Apply a whole batch. The digest after it; None if it is unknown, or the replica not indexed."""

    def on_snapshot(self, replica_id: ReplicaId, snapshot: Snapshot) -> Generator[None, None, Digest | None]:
        """Replace all that is known by a snapshot's hashes, a slice with each step; other calls may come
        between.

        Returns the digest after it; None if it is unknown, or the replica not indexed (any more).
        """

    def on_load(self, replica_id: ReplicaId, load: Load) -> None:
        """A load report without a batch, or whose batch must wait: `on_events` may repeat it later.
        All that is heard of a replica that has left."""

    def on_resync(self, replica_id: ReplicaId, reason: ResyncReason) -> None:
        """A snapshot will be fetched. After EPOCH and DRIFT, what was known of its blocks is void."""

    def on_malformed(self, replica_id: ReplicaId) -> None:
        """A message could not be read."""


class _State(Enum):
    SYNCING = auto()
    LIVE = auto()
    LEAVING = auto()  # for good


class EventCounters:
    """What became of all replicas' messages, since the process started."""

    def __init__(self) -> None:
        self.applied = 0  # batches
        self.repeated = 0  # batches and updates ignored because they, or later ones, were applied before
        self.lost = 0  # batches that gaps were made of, as far as that can be told
        self.snapshots: Counter[ResyncReason] = Counter()  # applied, by why they were wanted
        self.lag = LagCounts()  # from publication to application, per batch


class EventStream:
    """One replica's sequence of batches. `needs_snapshot` tells the edge when to fetch one."""

    def __init__(
        self,
        replica_id: ReplicaId,
        sink: EventSink,
        *,
        counters: EventCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = 4096,
    ) -> None:
        """max_waiting: batches held while a snapshot is fetched; older ones give way (a gap, found later)."""
        self._replica_id = replica_id
        self._sink = sink
        self.counters = counters or EventCounters()
        self.lag = LagMeter()
        self._clock = clock
        self._max_waiting = max_waiting
        self._state = _State.SYNCING
        self._reason = ResyncReason.JOIN  # why it was last SYNCING
        self._num_snapshots = 0  # begun to be applied: the latest is the one that counts
        self._slices: Generator[None, None, Digest | None] | None = None  # of that one
        self._epoch = 0
        self._seq = 0
        self._update = (0, 0)  # seq and number of the last load update
        self._spoke_last: int | None = None  # the epoch of the engine that did
        self.num_last_words = 0  # heard since it leaves
        # (epoch, seq) -> batch, in order of arrival. Keyed, so that a repeated batch waits once.
        self._waiting: OrderedDict[tuple[int, int], EventBatch] = OrderedDict()

    @property
    def needs_snapshot(self) -> bool:
        return self._state is _State.SYNCING

    @property
    def reason(self) -> ResyncReason:
        """Why a snapshot was wanted last."""
        return self._reason

    def start(self) -> None:
        """First contact: tell the sink that a snapshot is on its way."""
        self._sink.on_resync(self._replica_id, ResyncReason.JOIN)

    def feed_batch(self, batch: EventBatch) -> None:
        """A batch arrived, in whatever order."""
        if self._state is _State.LEAVING:
            self._hear_out(batch)
            return
        self._spoke_last = batch.epoch
        if self._state is _State.SYNCING:
            self._hold(batch)
        elif batch.epoch != self._epoch:
            self._resync(ResyncReason.EPOCH, batch)
        elif batch.seq <= self._seq:
            self.counters.repeated += 1
        elif batch.seq > self._seq + 1:
            self.counters.lost += batch.seq - self._seq - 1
            self._resync(ResyncReason.GAP, batch)
        else:
            self._apply(batch)

    def feed_load(self, update: LoadUpdate) -> None:
        """The load between two batches. One that is older than what is known is ignored."""
        if self._state is _State.LEAVING:
            self._hear_out(update)
            return
        self._spoke_last = update.epoch
        place = (update.seq, update.number)
        if self._state is _State.LIVE:
            if update.epoch != self._epoch:
                return  # the next batch says which of the two is the new one
            if place <= max(self._update, (self._seq, 0)):
                self.counters.repeated += 1
                return
            self._update = place
        self._sink.on_load(self._replica_id, update.load)

    def snapshot_slices(self, snapshot: Snapshot) -> Generator[None, None, None]:
        """A snapshot arrived: it becomes the truth, a slice with each step, then the waiting batches after it
        are applied. Other messages may be fed in between; a later snapshot ends an earlier one that is not
        through.

        Ignored unless SYNCING: it answers a question that no longer stands.
        """
        if self._state is not _State.SYNCING:
            return
        self._spoke_last = snapshot.epoch
        self._num_snapshots += 1
        number = self._num_snapshots
        if not any(epoch == snapshot.epoch and seq > snapshot.seq for epoch, seq in self._waiting):
            self._sink.on_load(self._replica_id, snapshot.load)
        if self._slices is not None:
            self._slices.close()
        with closing(self._sink.on_snapshot(self._replica_id, snapshot)) as slices:
            self._slices = slices
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    digest: Digest | None = end.value
                    break
                yield
                if number != self._num_snapshots:
                    return
        self._slices = None
        self._go_live(snapshot, digest)

    def doubt(self) -> None:
        """What it has said has proven wrong: a snapshot is wanted. Nothing happens while one is awaited."""
        if self._state is _State.LIVE:
            self._resync(ResyncReason.MISMATCH, None)

    def feed_malformed(self) -> None:
        """A message could not be read. Whatever it said is missing."""
        self._sink.on_malformed(self._replica_id)
        if self._state is _State.LIVE:
            self._resync(ResyncReason.MALFORMED, None)

    def leave(self) -> None:
        """It has left, and computes what it has: of what that engine says only the load is told from now on.
        Another one may speak at its address after it."""
        self._state = _State.LEAVING
        self._num_snapshots += 1  # one that is being applied goes no further

    def _hear_out(self, said: EventBatch | LoadUpdate) -> None:
        if self._spoke_last in (None, said.epoch):
            self._spoke_last = said.epoch
            self.num_last_words += 1
            self._sink.on_load(self._replica_id, said.load)

    def _go_live(self, snapshot: Snapshot, digest: Digest | None) -> None:
        """The snapshot is in: what waited comes after it."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        if snapshot.epoch != self._epoch:
            self.lag.forget()
        self._state = _State.LIVE
        self._epoch, self._seq, self._update = snapshot.epoch, snapshot.seq, (0, 0)
        self.counters.snapshots[self._reason] += 1
        if snapshot.digest is not None and digest is not None and digest != snapshot.digest:
            self._resync(ResyncReason.DRIFT, None)
        # Batches of another epoch are dropped. If they are of a *newer* one, the next batch says so.
        later = [batch for batch in waiting if batch.epoch == snapshot.epoch and batch.seq > snapshot.seq]
        for batch in sorted(later, key=lambda batch: batch.seq):
            self.feed_batch(batch)

    def _apply(self, batch: EventBatch) -> None:
        self._seq = batch.seq
        digest = self._sink.on_events(self._replica_id, batch)
        self.counters.applied += 1
        self.counters.lag.add(self.lag.lag_s(batch.sent_s, self._clock()))
        if digest is not None and digest != batch.digest:
            self._resync(ResyncReason.DRIFT, None)

    def _resync(self, reason: ResyncReason, batch: EventBatch | None) -> None:
        self._state = _State.SYNCING
        self._reason = reason
        self._sink.on_resync(self._replica_id, reason)
        if batch is not None:
            self._hold(batch)

    def _hold(self, batch: EventBatch) -> None:
        self._waiting[batch.epoch, batch.seq] = batch
        if len(self._waiting) > self._max_waiting:
            self._waiting.popitem(last=False)
        # Load is true whatever is missing: a replica that is being resynced is not a silent one.
        self._sink.on_load(self._replica_id, batch.load)
