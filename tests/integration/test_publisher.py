"""KV events over real sockets: order, gaps, snapshots at their seq, bad callers, taken ports."""

from __future__ import annotations

import contextlib
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from zmq.constants import DEALER, LINGER, NOBLOCK, RCVTIMEO, SUB, SUBSCRIBE
from zmq.error import Again
from zmq.sugar.context import Context

from cache.block_hash import BlockHasher, hints
from cache.event_log import EventLog
from cache.event_wire import decode_batch, decode_load, decode_snapshot
from cache.events import Digest, EventBatch, Load, LoadUpdate, QueuedPrompts, Snapshot
from cache.types import BlockHash, RequestId
from deploy.ports import free_base
from replica.engine.arrivals import Arrival
from replica.errors import EventSocketError
from replica.publisher import Publisher, new_epoch
from tests.fakes.engine import fingerprint
from tests.fakes.publisher import a_publisher

EPOCH = 7
HASHER = BlockHasher(fingerprint())
# ZMTP 3.0: its signature, version, mechanism, and that this is no server.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
CHAIN: list[BlockHash] = HASHER.chain(HASHER.root(), array("i", range(400)))


class Listener:
    """A router's two sockets."""

    def __init__(self, publisher: Publisher) -> None:
        self.context: Any = Context()
        self.sub = self._open(SUB, publisher.event_endpoint)
        self.sub.setsockopt(SUBSCRIBE, b"")
        self.dealer = self._open(DEALER, publisher.snapshot_endpoint)

    def _open(self, kind: int, endpoint: str) -> Any:
        opened = self.context.socket(kind)
        opened.setsockopt(LINGER, 0)
        opened.setsockopt(RCVTIMEO, 5000)
        opened.connect(endpoint)
        return opened

    def batch(self) -> EventBatch:
        topic, payload = self.sub.recv_multipart()
        assert topic == b"kv"
        return decode_batch(payload)

    def update(self) -> LoadUpdate:
        topic, payload = self.sub.recv_multipart()
        assert topic == b"load"
        return decode_load(payload)

    def ask(self, *frames: bytes) -> None:
        self.dealer.send_multipart(list(frames or (b"snapshot",)))

    def snapshot(self) -> Snapshot:
        return decode_snapshot(self.dealer.recv_multipart())


@contextmanager
def connected(*, tells_blocks: bool = True) -> Iterator[tuple[Publisher, EventLog, Listener]]:
    """A publisher with one batch out, and a listener whose subscription has arrived."""
    publisher = a_publisher(port=0, epoch=EPOCH, tells_blocks=tells_blocks)
    log = EventLog(EPOCH)
    publisher.start()
    listener = Listener(publisher)
    try:
        listener.sub.setsockopt(RCVTIMEO, 10)
        for _ in range(500):  # a subscription takes a moment; earlier batches are the late joiner's gap
            publisher.publish(log.flush(Load()))
            try:
                while listener.batch().seq < log.seq:
                    pass
                break
            except Again:
                continue
        listener.sub.setsockopt(RCVTIMEO, 5000)
        yield publisher, log, listener
    finally:
        publisher.close()
        listener.context.destroy(linger=0)


def test_batches_arrive_in_order_and_snapshots_match_their_seq() -> None:
    with connected() as (publisher, log, listener):
        first = log.seq
        for block_hash in CHAIN[:50]:
            log.stored(block_hash)
            publisher.publish(log.flush(Load(num_running=1)))
        for block_hash in CHAIN[49:39:-1]:
            log.removed(block_hash)
        publisher.publish(log.flush(Load(num_running=2)))
        batches = [listener.batch() for _ in range(51)]
        assert [b.seq for b in batches] == list(range(first + 1, first + 52))
        listener.ask()
        snapshot = listener.snapshot()
        assert snapshot == log.snapshot(Load(num_running=2))
        assert len(snapshot.hashes) == 40


def test_a_publisher_may_keep_its_blocks_to_itself() -> None:
    """Load alone goes out, and digests agree: nobody has a reason to ask for what is missing."""
    with connected(tells_blocks=False) as (publisher, log, listener):
        for block_hash in CHAIN[:3]:
            log.stored(block_hash)
        publisher.publish(log.flush(Load(num_running=1)))
        listener.ask()
        batch, snapshot = listener.batch(), listener.snapshot()
        assert (batch.stored, batch.removed, batch.digest) == ((), (), Digest())
        assert batch.load.num_running == snapshot.load.num_running == 1
        assert (len(snapshot.hashes), snapshot.digest, snapshot.seq) == (0, Digest(), batch.seq)


def test_snapshot_and_later_batches_together_are_the_cache() -> None:
    """A late joiner: whatever moment its snapshot comes from, no change is lost or counted twice."""
    with connected() as (publisher, log, listener):
        for number, block_hash in enumerate(CHAIN):
            log.stored(block_hash)
            publisher.publish(log.flush(Load()))
            if number == 20:
                listener.ask()
        snapshot = listener.snapshot()
        known = list(snapshot.hashes)
        while (batch := listener.batch()).seq < log.seq:
            if batch.seq > snapshot.seq:
                known += batch.stored
        known += batch.stored if batch.seq > snapshot.seq else ()
        assert known == list(log.snapshot(Load()).hashes)
        assert snapshot.epoch == batch.epoch == EPOCH


def test_snapshots_are_answered_while_the_engine_is_silent() -> None:
    """The engine may be inside a step of seconds: nothing is asked of its thread."""
    with connected() as (publisher, log, listener):
        log.stored(CHAIN[0])
        publisher.publish(log.flush(Load(free_blocks=3)))
        listener.batch()
        for _ in range(3):
            listener.ask()
            assert listener.snapshot() == log.snapshot(Load(free_blocks=3))


def arrival(name: str, num_blocks: int = 4) -> Arrival:
    return Arrival(RequestId(name), 4 * num_blocks + 1, hints(CHAIN[:num_blocks]), 4)


def test_arrivals_are_told_of_while_the_engine_is_silent() -> None:
    """The engine may be inside a long step: others must not go on routing as if nobody waited there."""
    with connected() as (publisher, log, listener):
        for block_hash in CHAIN[:2]:
            log.stored(block_hash)
        publisher.publish(log.flush(Load(queued_uncached_tokens=100, num_running=3)))
        listener.batch()
        publisher.arrived(arrival("a"))
        first = listener.update()
        assert (first.epoch, first.seq, first.number) == (EPOCH, log.seq, 1)
        # Two of its four blocks are cached; a twin of it finds all of them on their way.
        assert first.load == Load(
            queued_uncached_tokens=109,
            queued=(QueuedPrompts("", 1.0, 0.0, num_more=1, more_tokens=9),),
            num_waiting=1,
            num_running=3,
            admitted=(RequestId("a"),),
        )
        publisher.arrived(arrival("twin"))
        second = listener.update()
        assert (second.number, second.load.queued_uncached_tokens) == (2, 110)
        assert second.load.admitted == ("twin",)
        # The engine takes one of them in and refuses the other: from here on its own word counts.
        publisher.refused(RequestId("twin"))
        publisher.publish(log.flush(Load(queued_uncached_tokens=50, admitted=(RequestId("a"),))))
        assert listener.batch().load.queued_uncached_tokens == 50
        listener.ask()
        load = listener.snapshot().load
        assert (load.queued_uncached_tokens, load.num_waiting, load.admitted) == (50, 0, ("a",))
        publisher.arrived(arrival("b"))  # a third of the kind: the first is being computed
        third = listener.update()
        assert (third.seq, third.number, third.load.queued_uncached_tokens) == (log.seq, 1, 51)


def test_an_arrival_whose_batch_is_out_already_is_not_told_of_again() -> None:
    with connected() as (publisher, log, listener):
        publisher.arrived(arrival("a"))
        publisher.publish(log.flush(Load(num_running=1, admitted=(RequestId("a"),))))
        publisher.publish(log.flush(Load(num_running=2)))
        heard: list[str] = []
        while len(heard) < 3 and heard[-1:] != [str(log.seq)]:
            topic, payload = listener.sub.recv_multipart()
            heard.append(str(decode_batch(payload).seq) if topic == b"kv" else "load")
        assert heard in ([str(log.seq - 1), str(log.seq)], ["load", str(log.seq - 1), str(log.seq)])


def test_a_batch_counts_whoever_is_at_the_door_as_it_is_sent() -> None:
    """It ends a step: the engine has not looked at its inbox, and routers have dropped what they booked."""
    with connected() as (publisher, log, listener):
        publisher.publish(log.flush(Load(num_running=1)))
        listener.batch()
        publisher.arrived(arrival("a"))
        told = listener.update().load
        assert told.admitted == ("a",)
        publisher.publish(log.flush(Load(num_running=1)))
        late = listener.batch()
        assert (late.load.queued_uncached_tokens, late.load.num_waiting) == (told.queued_uncached_tokens, 1)
        assert late.digest == log.digest
        taken_in = Load(queued_uncached_tokens=17, num_running=2, admitted=(RequestId("a"),))
        publisher.publish(log.flush(taken_in))
        assert listener.batch().load == taken_in


def test_a_batch_made_before_the_engine_heard_of_a_drain_does_not_take_it_back() -> None:
    with connected() as (publisher, log, listener):
        publisher.draining()
        assert listener.update().load.is_draining
        publisher.publish(log.flush(Load(num_running=1)))
        assert listener.batch().load == Load(num_running=1, is_draining=True)


def test_a_crowd_of_arrivals_is_told_of_in_few_messages() -> None:
    with connected() as (publisher, _, listener):
        names = [f"r{number}" for number in range(500)]
        for name in names:
            publisher.arrived(arrival(name))
        told: list[str] = []
        num_updates = 0
        while len(told) < len(names):
            told += listener.update().load.admitted
            num_updates += 1
        assert told == names
        assert num_updates < len(names)


def test_a_large_cache_comes_whole() -> None:
    """More than a slice of the publisher's copying."""
    with connected() as (publisher, log, listener):
        many = HASHER.chain(HASHER.root(), array("i", range(4 * 20_000)))
        for block_hash in many:
            log.stored(block_hash)
        publisher.publish(log.flush(Load()))
        listener.batch()
        listener.ask()
        snapshot = listener.snapshot()
        assert list(snapshot.hashes) == hints(many)
        assert snapshot.digest == log.digest


@pytest.mark.parametrize(
    "frames", [(b"snapshots",), (b"",), (b"snapshot", b"snapshot"), (b"\x80\x04pickle",)]
)
def test_anything_but_a_snapshot_request_gets_no_answer(frames: tuple[bytes, ...]) -> None:
    with connected() as (_, _, listener):
        listener.ask(*frames)
        listener.ask()
        listener.snapshot()  # the good request's answer is the only one
        time.sleep(0.05)
        with pytest.raises(Again):
            listener.dealer.recv_multipart(NOBLOCK)


def test_an_oversized_request_costs_only_its_own_connection() -> None:
    with connected() as (publisher, _, listener):
        listener.ask(b"x" * 100_000)
        other = Listener(publisher)
        other.ask()
        assert other.snapshot().epoch == EPOCH
        other.context.destroy(linger=0)


def test_an_oversized_subscription_is_not_read_into_memory() -> None:
    """What it subscribes to is all that a subscriber may send: a few bytes."""
    with connected() as (publisher, log, listener):
        place, port = publisher.event_endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((place, int(port)), timeout=5.0) as stranger:
            stranger.sendall(_GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB")
            stranger.sendall(b"\x02" + (1 << 30).to_bytes(8, "big") + b"\x01kv")  # a frame of 1 GiB begins
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # its own greeting comes first
                    pass
        log.stored(CHAIN[0])
        publisher.publish(log.flush(Load()))
        assert listener.batch().seq == log.seq


def test_a_subscriber_that_does_not_read_blocks_nobody() -> None:
    with connected() as (publisher, log, listener):
        began_s = time.monotonic()
        for _ in range(30_000):
            publisher.publish(log.flush(Load()))
        listener.ask()
        assert listener.snapshot().epoch == EPOCH
        assert time.monotonic() - began_s < 30


def test_what_is_queued_behind_a_batch_that_cannot_be_sent_goes_out() -> None:
    """Closing is queued, too: nobody wakes the thread again after that."""
    with connected() as (publisher, log, listener):
        first, unsendable, last = [log.flush(Load(context_tokens=n)) for n in (1, 1 << 64, 3)]
        with publisher._wake_lock:  # all at once, as from an engine that is quicker than the thread
            for batch in (first, unsendable, last):
                publisher._news.put(batch)
            publisher._wake_out.send(b"")
        assert [listener.batch().seq for _ in range(2)] == [first.seq, last.seq]


def test_ports_follow_from_the_base_port() -> None:
    port = free_base()
    publisher = a_publisher(port=port, epoch=EPOCH)
    assert publisher.event_endpoint == f"tcp://127.0.0.1:{port}"
    assert publisher.snapshot_endpoint == f"tcp://127.0.0.1:{port + 1}"
    publisher.close()


def test_a_taken_port_is_named_and_nothing_stays_open() -> None:
    port = free_base() + 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(EventSocketError, match=f"event_port = {port}: cannot listen there"):
            a_publisher(port=port, epoch=EPOCH)
        with pytest.raises(EventSocketError) as caught:
            a_publisher(port=port - 1, epoch=EPOCH)  # the snapshot socket's port
        assert caught.value.port == port
    a_publisher(port=port, epoch=EPOCH).close()


def test_close_may_be_called_twice_and_before_start() -> None:
    publisher = a_publisher(port=0, epoch=EPOCH)
    publisher.close()
    publisher.close()
    log = EventLog(EPOCH)
    started = a_publisher(port=0, epoch=EPOCH)
    started.start()
    started.publish(log.flush(Load()))
    started.close()
    started.publish(log.flush(Load()))  # dropped
    started.close()


def test_epochs_differ() -> None:
    assert len({new_epoch() for _ in range(100)}) == 100
    assert all(0 <= new_epoch() < 1 << 64 for _ in range(100))
