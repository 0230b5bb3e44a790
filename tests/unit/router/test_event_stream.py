"""The order of events, case by case; every schedule is in `tests/property/test_event_stream.py`."""

from __future__ import annotations

from collections.abc import Generator, Set

from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, Snapshot, digest_of
from cache.types import HashHint, ReplicaId
from router.event_stream import EventStream, ResyncReason
from tests.fakes_router import replica_id

A = replica_id(0)


class Journal:
    """A sink that keeps a plain set and writes down what it was told."""

    def __init__(self) -> None:
        self.held: set[HashHint] = set()
        self.told: list[str] = []

    def on_events(self, replica: ReplicaId, events: EventBatch) -> Digest | None:
        self.held = self.held - set(events.removed) | set(events.stored)
        self.told.append(f"batch {events.seq}")
        return digest_of(self.held)

    def on_snapshot(self, replica: ReplicaId, snapshot: Snapshot) -> Generator[None, None, Digest | None]:
        self.told.append(f"begin {snapshot.seq}")
        yield
        self.held = set(snapshot.hashes)
        self.told.append(f"snapshot {snapshot.seq}")
        return digest_of(self.held)

    def on_load(self, replica: ReplicaId, load: Load) -> None:
        self.told.append(f"load {load.num_running}")

    def on_resync(self, replica: ReplicaId, reason: ResyncReason) -> None:
        self.told.append(f"resync {reason}")

    def on_malformed(self, replica: ReplicaId) -> None:
        self.told.append("malformed")


def batch(seq: int, held: Set[int], stored: Set[int] = frozenset(), epoch: int = 1) -> EventBatch:
    hints = tuple(map(HashHint, stored))
    digest = digest_of(list(map(HashHint, held)))
    return EventBatch(FORMAT_VERSION, epoch, seq, hints, (), digest, Load(num_running=seq))


def snapshot(seq: int, held: Set[int], epoch: int = 1) -> Snapshot:
    return Snapshot(FORMAT_VERSION, epoch, seq, tuple(map(HashHint, held)), Load(num_running=seq))


def live_stream() -> tuple[EventStream, Journal]:
    journal = Journal()
    stream = EventStream(A, journal)
    stream.start()
    stream.feed_snapshot(snapshot(5, {1}))
    journal.told.clear()
    return stream, journal


def test_live_batches_wait_for_the_snapshot_and_their_load_does_not() -> None:
    journal = Journal()
    stream = EventStream(A, journal)
    stream.start()
    stream.feed_batch(batch(6, {1, 2}, {2}))
    stream.feed_batch(batch(4, {1}, {1}))
    stream.feed_batch(batch(7, {1, 2, 3}, {3}))
    assert journal.held == set()
    stream.feed_snapshot(snapshot(5, {1}))
    waited = ["resync join", "load 6", "load 4", "load 7"]
    assert journal.told == [*waited, "begin 5", "snapshot 5", "batch 6", "batch 7"]
    assert journal.held == {1, 2, 3}
    assert not stream.needs_snapshot


def test_a_missing_batch_wants_a_snapshot_and_keeps_what_is_known() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(7, {1, 3}, {3}))
    assert stream.needs_snapshot
    assert journal.told == ["resync gap", "load 7"]
    assert journal.held == {1}


def test_a_gap_behind_the_snapshot_wants_another_one() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(9, {1, 9}, {9}))
    stream.feed_snapshot(snapshot(7, {1}))  # batch 8 is in neither
    assert stream.needs_snapshot
    assert journal.held == {1}
    stream.feed_snapshot(snapshot(8, {1}))
    assert not stream.needs_snapshot
    assert journal.held == {1, 9}


def test_doubt_wants_one_snapshot_and_keeps_what_is_known() -> None:
    stream, journal = live_stream()
    stream.doubt()
    stream.doubt()
    assert stream.needs_snapshot
    assert journal.told == ["resync mismatch"]
    assert journal.held == {1}
    stream.feed_batch(batch(6, {2, 3}, {3}))
    stream.feed_snapshot(snapshot(5, {2}))
    assert journal.held == {2, 3}
    assert not stream.needs_snapshot


def test_a_late_snapshot_never_rolls_back_a_live_stream() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(6, {1, 2}, {2}))
    stream.feed_snapshot(snapshot(5, {1}))
    assert journal.held == {1, 2}


def test_a_repeated_batch_changes_nothing() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(6, {1, 2}, {2}))
    stream.feed_batch(batch(6, {1, 2}, {2}))
    stream.feed_batch(batch(3, {7}, {7}))
    assert journal.told == ["batch 6"]
    assert stream.counters.repeated == 2


def test_a_new_epoch_voids_what_is_known() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(1, set(), epoch=2))
    assert journal.told == ["resync epoch", "load 1"]
    stream.feed_snapshot(snapshot(1, set(), epoch=2))
    assert journal.held == set()
    assert not stream.needs_snapshot


def test_a_digest_that_differs_is_found_at_once() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(6, {1, 2, 3}, {2}))
    assert journal.told == ["batch 6", "resync drift"]
    assert stream.needs_snapshot


def test_an_unreadable_message_is_a_gap() -> None:
    stream, journal = live_stream()
    stream.feed_malformed()
    assert journal.told == ["malformed", "resync malformed"]
    stream.feed_malformed()
    assert journal.told[-1] == "malformed"


def test_what_waits_is_bounded() -> None:
    journal = Journal()
    stream = EventStream(A, journal, max_waiting=2)
    for seq in (1, 2, 3, 3):
        stream.feed_batch(batch(seq, {seq}, {seq}))
    stream.feed_snapshot(snapshot(0, set()))
    # Batch 1 gave way: a gap, found at once.
    assert stream.needs_snapshot
    assert "batch 2" not in journal.told
