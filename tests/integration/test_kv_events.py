"""A replica's publisher and a router's subscriber over real sockets: the index follows the cache.

No Ray: the publisher's thread and the test's event loop. What may happen to messages in between is
tested without sockets in `tests/property/test_event_stream.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from zmq.asyncio import Context
from zmq.constants import LAST_ENDPOINT, PUB, ROUTER

from cache.event_log import EventLog
from cache.event_wire import encode, encode_snapshot
from cache.events import FORMAT_VERSION, Digest, EventBatch, Load, RequestEnded, Snapshot, digest_of
from cache.messages import ReplicaInfo
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from deploy.ports import free_base
from replica.config import SimConfig
from replica.node import running_node
from router.events.subscriber import SubscriberGroup, SubscriberSettings
from router.index.snapshot_slices import SLICE_BLOCKS
from router.placement.routing import Routing
from tests.fakes.engine import sim_config
from tests.fakes.publisher import a_publisher
from tests.fakes.router import chain, config, info, load, query, replica_id

A, B = replica_id(0), replica_id(1)
FAST = SubscriberSettings(snapshot_timeout_s=0.3, resync_interval_s=0.02, max_resync_interval_s=0.1)


class Engine:
    """A cache's event log behind a real publisher."""

    def __init__(
        self, epoch: int, port: int = 0, *, tells_blocks: bool = True, num_blocks: int = 10_000, **has: int
    ) -> None:
        """has: what else it tells of itself."""
        self.log = EventLog(epoch)
        self.tells_blocks = tells_blocks
        self.has = {"num_blocks": num_blocks, **has}
        self.publisher = a_publisher(port=port, epoch=epoch, tells_blocks=tells_blocks)
        self.publisher.start()

    @property
    def info(self) -> ReplicaInfo:
        return info(
            event_endpoint=self.publisher.event_endpoint,
            snapshot_endpoint=self.publisher.snapshot_endpoint,
            has_kv_events=self.tells_blocks,
            **self.has,
        )

    def store(self, hashes: list[BlockHash]) -> None:
        for block_hash in hashes:
            self.log.stored(block_hash)

    def beat(self, **changes: Any) -> None:
        self.publisher.publish(self.log.flush(load(**changes)))

    def lose(self) -> None:
        """A batch that never arrives: applied by the publisher's snapshot, sent to nobody."""
        self.publisher._apply(self.log.flush(load()))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(epoch=1)
    yield engine
    engine.publisher.close()


@pytest.fixture
def routing() -> Routing:
    return Routing(config())


@pytest.fixture
async def group(routing: Routing) -> AsyncIterator[SubscriberGroup]:
    async with SubscriberGroup(routing, FAST) as group:
        yield group


def hints(*names: int) -> tuple[HashHint, ...]:
    return tuple(map(HashHint, names))


async def until(condition: Callable[[], object], act: Callable[[], object] = lambda: None) -> None:
    """Wait for a condition, acting (a heartbeat) before each look."""
    async with asyncio.timeout(10):
        while not condition():
            act()
            await asyncio.sleep(0.02)


def follow(routing: Routing, group: SubscriberGroup, replicas: dict[ReplicaId, ReplicaInfo]) -> None:
    routing.update_replicas(replicas)
    group.update(replicas)


def digest(routing: Routing, replica: ReplicaId = A) -> Digest:
    return routing._index.digest(replica)


async def test_a_late_joiner_gets_the_snapshot_then_live_batches(
    engine: Engine, routing: Routing, group: SubscriberGroup
) -> None:
    engine.store(chain("early", 5))
    engine.beat()
    follow(routing, group, {A: engine.info})
    assert not group.is_synced(A)
    assert not group.all_synced()
    await until(lambda: group.all_synced() and digest(routing) == engine.log.digest)
    engine.store(chain("live", 7))
    await until(lambda: digest(routing) == engine.log.digest and digest(routing).count == 12, engine.beat)


async def test_a_lost_batch_is_repaired_by_a_snapshot(
    engine: Engine, routing: Routing, group: SubscriberGroup
) -> None:
    follow(routing, group, {A: engine.info})
    await until(lambda: group.is_synced(A) and digest(routing) == engine.log.digest, engine.beat)
    engine.store(chain("lost", 3))
    engine.lose()
    await until(lambda: group.is_synced(A) and digest(routing).count == 3, engine.beat)
    assert routing.statistics().resyncs["gap"] >= 1


async def test_a_cache_that_is_not_told_of_is_imitated(routing: Routing, group: SubscriberGroup) -> None:
    """Its load is followed as anybody's; what it really stores and evicts changes nothing here."""
    engine = Engine(epoch=3, tells_blocks=False)
    try:
        follow(routing, group, {A: engine.info})
        await until(lambda: group.all_synced(), engine.beat)
        placement = routing.choose(query("sent here", 6))
        engine.store(chain("stored unseen", 5))
        await until(
            lambda: routing.statistics().replicas[0].num_running == 7, lambda: engine.beat(num_running=7)
        )
        assert routing.statistics().replicas[0].num_blocks == 6
        routing.release(placement.request_id)
        assert routing.choose(query("sent here", 6)).overlap_blocks == 6
        assert routing.choose(query("stored unseen", 5)).overlap_blocks == 0
        assert routing.statistics().resyncs == {"join": 1}
    finally:
        engine.publisher.close()


async def test_a_cache_with_host_memory_is_larger_than_its_pool(
    routing: Routing, group: SubscriberGroup
) -> None:
    """Batches count what both hold, and so does the snapshot that who comes later begins with."""
    engine = Engine(epoch=4, num_blocks=4, num_host_blocks=8)
    try:
        follow(routing, group, {A: engine.info})
        await until(lambda: group.is_synced(A) and digest(routing) == engine.log.digest, engine.beat)
        early, late = chain("early", 4), chain("late", 4)
        engine.store(early)
        engine.beat()
        for block_hash in reversed(early):
            engine.log.demoted(block_hash)
        engine.store(late)
        await until(lambda: digest(routing) == engine.log.digest, engine.beat)
        assert digest(routing).count == 8
        other = Routing(config())
        async with SubscriberGroup(other, FAST) as newcomers:
            follow(other, newcomers, {A: engine.info})
            await until(lambda: newcomers.is_synced(A), engine.beat)
            assert digest(other) == engine.log.digest
            assert other.statistics().malformed_events == 0
        assert routing.statistics().malformed_events == 0
    finally:
        engine.publisher.close()


def test_a_replica_tells_how_much_host_memory_keeps() -> None:
    """Or Routers would take what it says of a cache larger than its pool for nonsense."""
    settings = sim_config(64, sim=SimConfig(), host_cache_gib=2**-20, event_host="127.0.0.1")
    with running_node(settings) as node:
        assert node.info.num_host_blocks == node.assembly.runner.info.num_host_blocks > 0


async def test_a_restarted_engine_is_followed_on_the_same_address(
    routing: Routing, group: SubscriberGroup
) -> None:
    port = free_base()
    first = Engine(epoch=1, port=port)
    endpoint = first.info
    follow(routing, group, {A: endpoint})
    first.store(chain("old", 4))
    await until(lambda: digest(routing).count == 4, first.beat)
    first.publisher.close()
    second = Engine(epoch=2, port=port)
    try:
        assert second.info == endpoint
        second.store(chain("new", 6))
        await until(lambda: group.is_synced(A) and digest(routing).count == 6, second.beat)
        assert digest(routing) == second.log.digest
    finally:
        second.publisher.close()


async def test_two_replicas_are_kept_apart_and_one_leaves(
    engine: Engine, routing: Routing, group: SubscriberGroup
) -> None:
    other = Engine(epoch=9)
    try:
        follow(routing, group, {A: engine.info, B: other.info})
        engine.store(chain("a", 2))
        other.store(chain("b", 3))
        await until(
            lambda: (digest(routing, A).count, digest(routing, B).count) == (2, 3),
            lambda: (engine.beat(), other.beat()),
        )
        follow(routing, group, {A: engine.info})
        assert not group.is_synced(B)
        assert routing.statistics().index_entries == 2
    finally:
        other.publisher.close()


async def test_what_ends_at_a_replica_that_leaves_is_heard(
    engine: Engine, routing: Routing, group: SubscriberGroup
) -> None:
    """Serve takes it from the set as it begins to stop: what it went on computing for clients that did not
    read it was charged to nobody."""
    heard: list[RequestEnded] = []
    routing.watch_ends(heard.append)
    ended = RequestEnded(RequestId("q"), 0, 9)
    follow(routing, group, {A: engine.info})
    await until(lambda: group.is_synced(A), engine.beat)
    follow(routing, group, {})
    await until(lambda: heard, lambda: engine.beat(ended=(ended,)))
    assert (set(heard), group.is_synced(A)) == ({ended}, False)
    follow(routing, group, {A: engine.info})  # it is back
    await until(lambda: group.is_synced(A) and not group._closing, engine.beat)
    assert routing.statistics().replicas[0].replica_id == A


async def test_a_replica_that_leaves_has_gone_when_it_is_silent_or_another_is_at_its_address(
    engine: Engine, routing: Routing
) -> None:
    heard: list[RequestEnded] = []
    routing.watch_ends(heard.append)
    async with SubscriberGroup(routing, replace(FAST, gone_after_s=0.05)) as group:
        follow(routing, group, {A: engine.info})
        await until(lambda: group.is_synced(A), engine.beat)
        subscriber = group._subscribers[A]
        follow(routing, group, {})
        log, ended = EventLog(epoch=2), (RequestEnded(RequestId("q"), 0, 9),)

        def speak() -> None:
            subscriber._on_frames([b"kv", encode(log.flush(load(ended=ended)))])

        await until(lambda: not group._closing, speak)
        assert subscriber._events is not None
        assert subscriber._events._is_closed
    assert (heard, group._leaving) == ([], {})


async def test_an_unreachable_replica_costs_only_its_own_prefix_data(
    engine: Engine, routing: Routing, group: SubscriberGroup
) -> None:
    follow(routing, group, {A: engine.info, B: info(event_endpoint="nonsense")})
    await until(lambda: group.is_synced(A), engine.beat)
    assert not group.is_synced(B)


class RawReplica:
    """Sockets that say exactly what a test tells them to."""

    def __init__(self) -> None:
        self.context = Context()
        self.pub: Any = self.context.socket(PUB)
        self.router: Any = self.context.socket(ROUTER)
        for socket in (self.pub, self.router):
            socket.bind("tcp://127.0.0.1:*")
        self.answers: list[Sequence[bytes]] = []
        self.num_asked = 0

    @property
    def info(self) -> ReplicaInfo:
        ends = [socket.getsockopt_string(LAST_ENDPOINT) for socket in (self.pub, self.router)]
        return info(event_endpoint=ends[0], snapshot_endpoint=ends[1], num_blocks=100)

    async def answer(self) -> None:
        """Answer each request with the next of `answers`; none left: stay silent."""
        while True:
            identity, _ = await self.router.recv_multipart()
            self.num_asked += 1
            if self.answers:
                await self.router.send_multipart([identity, *self.answers.pop(0)])


@pytest.fixture
async def raw() -> AsyncIterator[RawReplica]:
    raw = RawReplica()
    task = asyncio.create_task(raw.answer())
    yield raw
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raw.context.destroy(linger=0)


GOOD_SNAPSHOT = encode_snapshot(Snapshot(FORMAT_VERSION, 1, 3, hints(1, 2, 3), Load()))


async def follow_well(raw: RawReplica, routing: Routing, group: SubscriberGroup) -> None:
    """A replica whose snapshots are right, however often it is asked for one."""
    raw.answers = [GOOD_SNAPSHOT] * 100
    follow(routing, group, {A: raw.info})
    await until(lambda: group.is_synced(A))


async def test_garbage_is_counted_and_survived(
    raw: RawReplica, routing: Routing, group: SubscriberGroup
) -> None:
    raw.answers = [[b"\xc1 not msgpack", b""], [GOOD_SNAPSHOT[0]], GOOD_SNAPSHOT]
    follow(routing, group, {A: raw.info})
    await until(lambda: group.is_synced(A))
    assert routing.statistics().malformed_events >= 1

    raw.answers = [GOOD_SNAPSHOT] * 20
    lying = encode(EventBatch(FORMAT_VERSION, 1, 4, (), (), Digest(101, 0), Load()))  # of 100 blocks
    before = routing.statistics().malformed_events
    frames = ([b"kv"], [b"kv", b"\x00" * 10], [b"kv", lying], [b"kv", b"a", b"b"])

    def send_garbage() -> None:
        for message in frames:
            raw.pub.send_multipart(message)

    await until(lambda: routing.statistics().malformed_events >= before + 4, send_garbage)
    await until(lambda: group.is_synced(A))
    assert digest(routing).count == 3


async def test_another_versions_events_are_counted_and_complained_of_once(
    raw: RawReplica, routing: Routing, group: SubscriberGroup, caplog: pytest.LogCaptureFixture
) -> None:
    old = encode(EventBatch(FORMAT_VERSION - 1, 1, 4, (), (), Digest(), Load()))
    follow(routing, group, {A: raw.info})
    with caplog.at_level("WARNING", logger="router.events.subscriber"):
        await until(
            lambda: routing.statistics().malformed_events >= 20,
            lambda: raw.pub.send_multipart([b"kv", old]),
        )
        [complaint] = [record for record in caplog.records if record.message == "malformed event"]
        told = f"of format version {FORMAT_VERSION - 1}, not {FORMAT_VERSION}"
        assert told in complaint.detail  # type: ignore[attr-defined]
    assert A in routing.replicas  # and still chosen from


async def test_a_snapshot_that_never_comes_is_asked_for_again_but_not_in_a_hurry(
    raw: RawReplica, routing: Routing, group: SubscriberGroup
) -> None:
    follow(routing, group, {A: raw.info})
    await asyncio.sleep(1.0)
    assert not group.is_synced(A)
    assert 2 <= raw.num_asked <= 4  # 0.3 s patience and 0.02 s, 0.04 s, ... between
    raw.answers = [GOOD_SNAPSHOT]
    await until(lambda: group.is_synced(A))


async def test_snapshots_that_what_comes_next_contradicts_are_not_asked_for_in_a_hurry(
    raw: RawReplica, routing: Routing, group: SubscriberGroup
) -> None:
    """A replica that goes on saying what nobody can follow would have its cache sent all day."""
    await follow_well(raw, routing, group)
    ends_at = time.monotonic() + 1.0
    await until(lambda: time.monotonic() > ends_at, lambda: raw.pub.send_multipart([b"kv", b"\x00"]))
    assert 2 <= raw.num_asked <= 15  # 0.02 s, 0.04 s, 0.08 s, and then 0.1 s between, and a message's wait


async def test_drift_is_found_by_the_digest_and_repaired(
    raw: RawReplica, routing: Routing, group: SubscriberGroup
) -> None:
    await follow_well(raw, routing, group)
    wrong = encode(EventBatch(FORMAT_VERSION, 1, 4, (), (), Digest(2, 1 ^ 2), Load()))
    await until(
        lambda: routing.statistics().resyncs.get("drift", 0) >= 1,
        lambda: raw.pub.send_multipart([b"kv", wrong]),
    )
    await until(lambda: group.is_synced(A) and digest(routing).count == 3)


async def test_a_doubted_replica_is_asked_for_a_snapshot(
    raw: RawReplica, routing: Routing, group: SubscriberGroup
) -> None:
    await follow_well(raw, routing, group)
    num_asked = raw.num_asked
    group.resync(A)
    group.resync(B)  # nobody listens to it
    assert not group.is_synced(A)
    await until(lambda: group.is_synced(A))
    assert raw.num_asked == num_asked + 1
    assert routing.statistics().resyncs["mismatch"] == 1


async def test_other_work_goes_on_between_the_slices_of_a_large_snapshot(
    raw: RawReplica, routing: Routing, group: SubscriberGroup
) -> None:
    many = hints(*range(1, 40 * SLICE_BLOCKS))
    raw.answers = [encode_snapshot(Snapshot(FORMAT_VERSION, 1, 3, many, Load()))] * 2
    follow(routing, group, {A: replace(raw.info, num_blocks=len(many))})

    async def counts_until_synced() -> set[int]:
        counts = set()
        async with asyncio.timeout(10):
            while not group.is_synced(A):
                counts.add(digest(routing).count)
                await asyncio.sleep(0)
        assert digest(routing) == digest_of(many)
        return counts

    assert len(await counts_until_synced()) >= 40
    # Doubted, it goes on as it is until the whole new one is in.
    group.resync(A)
    assert await counts_until_synced() == {len(many)}


async def test_closing_twice_leaves_no_task(engine: Engine, routing: Routing) -> None:
    group = SubscriberGroup(routing, FAST)
    follow(routing, group, {A: engine.info})
    before = asyncio.all_tasks()
    assert len(before) > 1
    await group.aclose()
    await group.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    group.update({A: engine.info})
    assert not group.is_synced(A)
