"""The order of events, case by case; every schedule is in `tests/property/test_event_stream.py`."""

from __future__ import annotations

from collections.abc import Generator, Set
from dataclasses import replace

import msgspec
import pytest

from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, LoadUpdate, Snapshot, digest_of
from cache.types import HashHint, ReplicaId
from router.events.event_stream import EventStream, ResyncReason
from tests.fakes.router import replica_id
from tests.fakes.routing import whole

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


def batch(
    seq: int, held: Set[int], stored: Set[int] = frozenset(), epoch: int = 1, sent_s: float = 0.0
) -> EventBatch:
    hints = tuple(map(HashHint, stored))
    digest = digest_of(list(map(HashHint, held)))
    return EventBatch(FORMAT_VERSION, epoch, seq, hints, (), digest, Load(num_running=seq), sent_s)


def removal(seq: int, held: Set[int], removed: Set[int]) -> EventBatch:
    return msgspec.structs.replace(batch(seq, held), removed=tuple(map(HashHint, removed)))


def update(seq: int, number: int, epoch: int = 1) -> LoadUpdate:
    return LoadUpdate(FORMAT_VERSION, epoch, seq, number, Load(num_running=10 * seq + number))


def snapshot(seq: int, held: Set[int], epoch: int = 1) -> Snapshot:
    return Snapshot(FORMAT_VERSION, epoch, seq, tuple(map(HashHint, held)), Load(num_running=seq))


def live_stream() -> tuple[EventStream, Journal]:
    journal = Journal()
    stream = EventStream(A, journal)
    stream.start()
    whole(stream.snapshot_slices(snapshot(5, {1})))
    journal.told.clear()
    return stream, journal


def test_live_batches_wait_for_the_snapshot_and_their_load_does_not() -> None:
    journal = Journal()
    stream = EventStream(A, journal)
    stream.start()
    stream.feed_batch(batch(7, {1, 2, 3}, {3}))
    stream.feed_batch(batch(4, {1}, {1}))
    stream.feed_batch(batch(6, {1, 2}, {2}))
    assert journal.held == set()
    whole(stream.snapshot_slices(snapshot(5, {1})))
    waited = ["resync join", "load 7", "load 4", "load 6"]
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
    whole(stream.snapshot_slices(snapshot(7, {1})))  # batch 8 is in neither
    assert stream.needs_snapshot
    assert journal.held == {1}
    whole(stream.snapshot_slices(snapshot(8, {1})))
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
    whole(stream.snapshot_slices(snapshot(5, {2})))
    assert journal.held == {2, 3}
    assert not stream.needs_snapshot


def test_a_late_snapshot_never_rolls_back_a_live_stream() -> None:
    stream, journal = live_stream()
    stream.feed_batch(batch(6, {1, 2}, {2}))
    whole(stream.snapshot_slices(snapshot(5, {1})))
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
    whole(stream.snapshot_slices(snapshot(1, set(), epoch=2)))
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
    whole(stream.snapshot_slices(snapshot(0, set())))
    # Batch 1 gave way: a gap, found at once.
    assert stream.needs_snapshot
    assert "batch 2" not in journal.told


def test_a_removal_is_not_undone_by_an_older_store() -> None:
    """Repeated or late: a store that comes after the removal speaks of the time before it."""
    stream, journal = live_stream()
    stored = batch(6, {1, 2}, {2})
    stream.feed_batch(stored)
    stream.feed_batch(removal(7, {1}, {2}))
    stream.feed_batch(stored)
    assert journal.held == {1}
    assert not stream.needs_snapshot


def test_a_removal_that_arrives_before_the_store_waits_for_what_is_missing() -> None:
    stream, journal = live_stream()
    stream.feed_batch(removal(7, {1}, {2}))
    assert stream.needs_snapshot
    stream.feed_batch(batch(6, {1, 2}, {2}))
    whole(stream.snapshot_slices(snapshot(5, {1})))  # from before both
    assert journal.held == {1}
    stream.feed_batch(batch(6, {1, 2}, {2}))
    assert journal.held == {1}
    assert not stream.needs_snapshot


def test_batches_between_two_slices_of_a_snapshot_wait_for_the_last() -> None:
    stream, journal = live_stream()
    stream.doubt()
    slices = stream.snapshot_slices(snapshot(6, {1, 2}))
    next(slices)
    stream.feed_batch(batch(7, {1, 2, 3}, {3}))
    assert stream.needs_snapshot
    assert journal.held == {1}
    assert next(slices, "over") == "over"
    assert journal.held == {1, 2, 3}
    assert not stream.needs_snapshot


def test_a_later_snapshot_ends_an_earlier_one() -> None:
    stream, journal = live_stream()
    stream.doubt()
    earlier = stream.snapshot_slices(snapshot(6, {1, 2}))
    next(earlier)
    whole(stream.snapshot_slices(snapshot(8, {8})))
    assert next(earlier, "over") == "over"
    assert journal.held == {8}
    assert stream.counters.snapshots == {ResyncReason.JOIN: 1, ResyncReason.MISMATCH: 1}


def test_a_snapshot_that_is_not_what_its_digest_says_is_not_believed() -> None:
    stream, journal = live_stream()
    stream.doubt()
    lying = replace(snapshot(6, {1, 2}), digest=digest_of([HashHint(1), HashHint(3)]))
    whole(stream.snapshot_slices(lying))
    assert stream.needs_snapshot
    assert "resync drift" in journal.told


def test_load_between_batches_is_told_in_order_only() -> None:
    stream, journal = live_stream()
    for seq, number in ((5, 2), (5, 1), (5, 2), (4, 9), (5, 3)):
        stream.feed_load(update(seq, number))
    stream.feed_batch(batch(6, {1}))
    stream.feed_load(update(5, 4))
    stream.feed_load(update(6, 1))
    stream.feed_load(update(7, 1, epoch=9))  # nobody we know
    assert journal.told == ["load 52", "load 53", "batch 6", "load 61"]
    assert stream.counters.repeated == 4


def test_load_is_told_while_a_snapshot_is_awaited() -> None:
    journal = Journal()
    stream = EventStream(A, journal)
    stream.feed_load(update(5, 1))
    stream.feed_batch(batch(6, {1}))
    whole(stream.snapshot_slices(snapshot(5, {1})))  # its load is older than batch 6's
    assert journal.told == ["load 51", "load 6", "begin 5", "snapshot 5", "batch 6"]


def test_what_was_lost_repeated_and_repaired_is_counted() -> None:
    now = [100.0]
    journal = Journal()
    stream = EventStream(A, journal, clock=lambda: now[0])
    whole(stream.snapshot_slices(snapshot(5, {1})))
    for seq, delay_s in ((6, 0.0), (7, 0.003), (8, 0.3)):
        now[0] = 100.0 + seq + delay_s
        stream.feed_batch(batch(seq, {1}, sent_s=float(seq)))
    stream.feed_batch(batch(8, {1}))
    stream.feed_batch(batch(12, {1}))
    whole(stream.snapshot_slices(snapshot(12, {1})))
    stream.feed_batch(batch(13, {4}))  # not what we have
    whole(stream.snapshot_slices(snapshot(13, {4})))
    counters = stream.counters
    assert (counters.applied, counters.repeated, counters.lost) == (4, 1, 3)
    assert counters.snapshots == {ResyncReason.JOIN: 1, ResyncReason.GAP: 1, ResyncReason.DRIFT: 1}
    assert sum(counters.lag.counts) == 4
    assert counters.lag.sum_s > 0.3


def test_of_one_that_leaves_only_what_its_engine_says_of_its_load_is_told() -> None:
    stream, journal = live_stream()
    stream.leave()
    stream.feed_batch(batch(6, {1, 2}, {2}))
    stream.feed_load(update(6, 1))
    stream.feed_batch(batch(1, {3}, {3}, epoch=2))  # another is at its address
    stream.feed_load(update(1, 1, epoch=2))
    stream.feed_batch(batch(9, {1}))  # a gap is nobody's concern any more
    stream.feed_malformed()
    assert journal.told == ["load 6", "load 61", "load 9", "malformed"]
    assert (stream.num_last_words, stream.needs_snapshot) == (3, False)


@pytest.mark.parametrize("spoke", ["batch", "update", "snapshot", "nobody"])
def test_whose_words_are_the_last_is_known_from_whatever_it_said_before(spoke: str) -> None:
    journal = Journal()
    stream = EventStream(A, journal)
    if spoke == "batch":
        stream.feed_batch(batch(5, {1}))
    elif spoke == "update":
        stream.feed_load(update(5, 1))
    elif spoke == "snapshot":
        whole(stream.snapshot_slices(snapshot(5, {1})))
    stream.leave()
    stream.feed_load(update(1, 2, epoch=2))
    stream.feed_load(update(5, 2))
    assert stream.num_last_words == 1
    assert journal.told[-1] == ("load 12" if spoke == "nobody" else "load 52")


def test_a_snapshot_of_one_that_leaves_goes_no_further() -> None:
    journal = Journal()
    stream = EventStream(A, journal)
    begun = stream.snapshot_slices(snapshot(5, {1}))
    next(begun)
    stream.leave()
    whole(begun)
    whole(stream.snapshot_slices(snapshot(6, {1})))
    assert journal.told == ["load 5", "begin 5"]
    assert not stream.needs_snapshot
