"""The order of one replica's events: what to apply, what to hold back, when to ask for a snapshot.

    SYNCING  a snapshot is wanted; live batches wait (the last `max_waiting` of them)
    LIVE     batch seq + 1 of the same epoch is applied; anything else is old, or a reason to resync

A state machine over decoded messages: no sockets, no clock, no tasks, so that every schedule of loss,
duplication, reordering and restarts can be tested. `router/subscriber.py` is its edge.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, StrEnum, auto
from typing import Protocol

from cache.events import Digest, EventBatch, Load, Snapshot
from cache.types import ReplicaId


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

    def on_events(self, replica_id: ReplicaId, events: EventBatch | Snapshot) -> Digest | None:
        """Apply a whole batch, or replace all by a snapshot. The digest after it; None if not indexed."""

    def on_load(self, replica_id: ReplicaId, load: Load) -> None:
        """A load report whose batch must wait. May be repeated by `on_events` later."""

    def on_resync(self, replica_id: ReplicaId, reason: ResyncReason) -> None:
        """A snapshot will be fetched. After EPOCH and DRIFT, what was known of its blocks is void."""

    def on_malformed(self, replica_id: ReplicaId) -> None:
        """A message could not be read."""


class _State(Enum):
    SYNCING = auto()
    LIVE = auto()


class EventStream:
    """One replica's sequence of batches. `needs_snapshot` tells the edge when to fetch one."""

    def __init__(self, replica_id: ReplicaId, sink: EventSink, *, max_waiting: int = 4096) -> None:
        """max_waiting: batches held while a snapshot is fetched; older ones give way (a gap, found later)."""
        self._replica_id = replica_id
        self._sink = sink
        self._max_waiting = max_waiting
        self._state = _State.SYNCING
        self._epoch = 0
        self._seq = 0
        # (epoch, seq) -> batch, in order of arrival. Keyed, so that a repeated batch waits once.
        self._waiting: OrderedDict[tuple[int, int], EventBatch] = OrderedDict()
        self.num_repeated = 0  # batches ignored because they were applied before

    @property
    def needs_snapshot(self) -> bool:
        return self._state is _State.SYNCING

    def start(self) -> None:
        """First contact: tell the sink that a snapshot is on its way."""
        self._sink.on_resync(self._replica_id, ResyncReason.JOIN)

    def feed_batch(self, batch: EventBatch) -> None:
        """A batch arrived, in whatever order."""
        if self._state is _State.SYNCING:
            self._hold(batch)
        elif batch.epoch != self._epoch:
            self._resync(ResyncReason.EPOCH, batch)
        elif batch.seq <= self._seq:
            self.num_repeated += 1
        elif batch.seq > self._seq + 1:
            self._resync(ResyncReason.GAP, batch)
        else:
            self._apply(batch)

    def feed_snapshot(self, snapshot: Snapshot) -> None:
        """A snapshot arrived: it becomes the truth, then the waiting batches after it are applied.

        Ignored while LIVE: it answers a question that no longer stands.
        """
        if self._state is _State.LIVE:
            return
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._state = _State.LIVE
        self._epoch, self._seq = snapshot.epoch, snapshot.seq
        self._sink.on_events(self._replica_id, snapshot)
        # Batches of another epoch are dropped. If they are of a *newer* one, the next batch says so.
        later = [batch for batch in waiting if batch.epoch == snapshot.epoch and batch.seq > snapshot.seq]
        for batch in sorted(later, key=lambda batch: batch.seq):
            self.feed_batch(batch)

    def doubt(self) -> None:
        """What it has said has proven wrong: a snapshot is wanted. Nothing happens while one is awaited."""
        if self._state is _State.LIVE:
            self._resync(ResyncReason.MISMATCH, None)

    def feed_malformed(self) -> None:
        """A message could not be read. Whatever it said is missing."""
        self._sink.on_malformed(self._replica_id)
        if self._state is _State.LIVE:
            self._resync(ResyncReason.MALFORMED, None)

    def _apply(self, batch: EventBatch) -> None:
        self._seq = batch.seq
        digest = self._sink.on_events(self._replica_id, batch)
        if digest is not None and digest != batch.digest:
            self._resync(ResyncReason.DRIFT, None)

    def _resync(self, reason: ResyncReason, batch: EventBatch | None) -> None:
        self._state = _State.SYNCING
        self._sink.on_resync(self._replica_id, reason)
        if batch is not None:
            self._hold(batch)

    def _hold(self, batch: EventBatch) -> None:
        self._waiting[batch.epoch, batch.seq] = batch
        if len(self._waiting) > self._max_waiting:
            self._waiting.popitem(last=False)
        # Load is true whatever is missing: a replica that is being resynced is not a silent one.
        self._sink.on_load(self._replica_id, batch.load)
