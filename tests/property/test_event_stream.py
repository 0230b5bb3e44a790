"""Whatever happens to a replica's events on the way, the index ends as the replica's cache.

A publisher with a real `EventLog` changes its cache, restarts, answers snapshots late; the channel loses,
repeats and reorders. Once things are quiet for a few heartbeats, index and truth are equal.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.events import Digest, EventBatch, EventLog, Load, Snapshot, digest_of
from cache.types import BlockHash, HashHint, ReplicaId
from router.event_stream import EventStream, ResyncReason
from router.hash_trie import HashTrie

REPLICA = ReplicaId("r")


class Index:
    """A sink over a real trie, strict about what it is given."""

    def __init__(self) -> None:
        self.trie = HashTrie()
        self.trie.add_replica(REPLICA)
        self.resyncs: list[ResyncReason] = []
        self.num_malformed = 0
        self.last_load: Load | None = None

    def on_events(self, replica_id: ReplicaId, events: EventBatch | Snapshot) -> Digest | None:
        self.last_load = events.load
        if isinstance(events, Snapshot):
            self.trie.replace(replica_id, events.hashes)
        else:
            self.trie.remove(replica_id, events.removed)
            self.trie.store(replica_id, events.stored)
        return self.trie.digest(replica_id)

    def on_load(self, replica_id: ReplicaId, load: Load) -> None:
        self.last_load = load

    def on_resync(self, replica_id: ReplicaId, reason: ResyncReason) -> None:
        self.resyncs.append(reason)
        if reason in (ResyncReason.EPOCH, ResyncReason.DRIFT):
            self.trie.remove_replica(replica_id)
            self.trie.add_replica(replica_id)

    def on_malformed(self, replica_id: ReplicaId) -> None:
        self.num_malformed += 1


class Engine:
    """A cache of a few blocks, its log, and the set it really holds as of the last batch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.log = EventLog(self.epoch * 7919)
        self.held: set[int] = set()

    def toggle(self, number: int) -> None:
        block_hash = BlockHash(number.to_bytes(8, "little") + self.epoch.to_bytes(8, "little"))
        if number in self.held:
            self.held.remove(number)
            self.log.removed(block_hash)
        else:
            self.held.add(number)
            self.log.stored(block_hash)

    def flush(self) -> EventBatch:
        return self.log.flush(Load(num_running=self.log.seq + 1))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("toggle"), st.lists(st.integers(1, 12), max_size=4)),
        st.tuples(st.just("deliver"), st.integers(0, 5)),  # which of the batches on the way
        st.tuples(st.just("repeat"), st.integers(0, 5)),
        st.tuples(st.just("lose"), st.integers(0, 5)),
        st.tuples(st.just("ask"), st.just(0)),  # the router's request reaches the replica
        st.tuples(st.just("answer"), st.integers(0, 2)),  # one of the answers on the way arrives
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("garbage"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(EVENTS, st.integers(1, 8))
def test_index_equals_truth_after_any_schedule(schedule: list, max_waiting: int) -> None:
    engine, index = Engine(), Index()
    stream = EventStream(REPLICA, index, max_waiting=max_waiting)
    stream.start()
    on_the_way: list[EventBatch] = []
    answers: list[Snapshot] = []
    for what, value in schedule:
        if what == "toggle":
            for number in value:
                engine.toggle(number)
            on_the_way.append(engine.flush())
        elif what in ("deliver", "repeat", "lose") and on_the_way:
            position = min(value, len(on_the_way) - 1)
            batch = on_the_way[position] if what == "repeat" else on_the_way.pop(position)
            if what != "lose":
                stream.feed_batch(batch)
        elif what == "ask" and stream.needs_snapshot:
            answers.append(engine.log.snapshot(Load()))
        elif what == "answer" and answers:
            stream.feed_snapshot(answers.pop(min(value, len(answers) - 1)))
        elif what == "restart":
            engine.restart()
        elif what == "garbage":
            stream.feed_malformed()
    settle(engine, stream)
    assert index.trie.digest(REPLICA) == digest_of([HashHint(number) for number in engine.held])
    assert not stream.needs_snapshot
    assert index.last_load == Load(num_running=engine.log.seq)


def settle(engine: Engine, stream: EventStream) -> None:
    """A few heartbeats, each answered with a snapshot where one is wanted: as the edge does."""
    for _ in range(4):
        stream.feed_batch(engine.flush())
        if stream.needs_snapshot:
            stream.feed_snapshot(engine.log.snapshot(Load(num_running=engine.log.seq)))


@given(st.lists(st.lists(st.integers(1, 12), max_size=4), max_size=20), st.randoms())
def test_a_perfect_channel_needs_one_snapshot(changes: list[list[int]], rng: object) -> None:
    engine, index = Engine(), Index()
    stream = EventStream(REPLICA, index)
    stream.start()
    stream.feed_snapshot(engine.log.snapshot(Load()))
    for numbers in changes:
        for number in numbers:
            engine.toggle(number)
        stream.feed_batch(engine.flush())
        assert index.trie.digest(REPLICA) == engine.log.digest
    assert index.resyncs == [ResyncReason.JOIN]
