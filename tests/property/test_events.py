"""KV events: what goes over the wire comes back equal, nothing else comes back at all, loss cannot hide."""

from __future__ import annotations

from array import array
from dataclasses import replace
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import event_log, events
from cache.errors import WireError
from cache.event_log import EventLog
from cache.event_wire import decode_batch, decode_load, decode_snapshot, encode, encode_snapshot
from cache.events import (
    FORMAT_VERSION,
    Digest,
    EventBatch,
    Load,
    LoadUpdate,
    QueuedPrompts,
    RequestEnded,
    Snapshot,
    StepTimeModel,
    digest_of,
)
from cache.types import BlockHash, HashHint, RequestId
from tests.fakes.cache import Subscriber

U64 = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**40)
REQUESTS = st.integers(0, events.MAX_REQUESTS)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)
PROMPTS = st.lists(st.tuples(SECONDS, COUNT), max_size=4).map(sorted)
QUEUED = st.builds(
    lambda tenant, share, had, prompts, num_more, more: QueuedPrompts(
        tenant, share, had, tuple([at for at, _ in prompts]), tuple([n for _, n in prompts]), num_more, more
    ),
    st.text(max_size=8), st.floats(0.01, 100.0), st.floats(0.0, 1e9), PROMPTS, COUNT, COUNT,
)  # fmt: skip
LOADS = st.builds(
    Load,
    queued_uncached_tokens=COUNT,
    queued=st.lists(QUEUED, max_size=3, unique_by=lambda of: of.tenant).map(tuple),
    num_waiting=REQUESTS,
    num_running=REQUESTS,
    context_tokens=COUNT,
    free_blocks=COUNT,
    growth_blocks=COUNT,
    total_blocks=COUNT,
    is_draining=st.booleans(),
    step_time=st.none() | st.builds(StepTimeModel, SECONDS, SECONDS, SECONDS, SECONDS),
    admitted=st.lists(st.text(max_size=20).map(RequestId), max_size=4).map(tuple),
    ended=st.lists(
        st.builds(RequestEnded, st.text(max_size=20).map(RequestId), COUNT, COUNT), max_size=3
    ).map(tuple),
)
HINTS = st.lists(U64.map(HashHint), max_size=12, unique=True)
BATCHES = st.builds(
    lambda epoch, seq, names, cut, digest, load, sent_s: EventBatch(
        FORMAT_VERSION, epoch, seq, tuple(names[:cut]), tuple(names[cut:]), digest, load, sent_s
    ),
    U64, COUNT, HINTS, st.integers(0, 12), st.builds(Digest, st.integers(12, 2**40), U64), LOADS, SECONDS,
)  # fmt: skip
UPDATES = st.builds(LoadUpdate, st.just(FORMAT_VERSION), U64, COUNT, COUNT, LOADS)
SNAPSHOTS = st.builds(
    lambda epoch, seq, names, load: Snapshot(
        FORMAT_VERSION, epoch, seq, array("Q", names), load, digest_of(names)
    ),
    U64, COUNT, HINTS, LOADS,
)  # fmt: skip


def decode_head(wire: bytes) -> Snapshot:
    """A snapshot of no hashes, of which only the head is on trial."""
    return decode_snapshot([wire, b""])


def encode_any(message: EventBatch | LoadUpdate | Snapshot) -> bytes:
    return encode_snapshot(message)[0] if isinstance(message, Snapshot) else encode(message)


DECODERS = (decode_batch, decode_load, decode_head)


@given(BATCHES)
def test_batch_comes_back(batch: EventBatch) -> None:
    assert decode_batch(encode(batch)) == batch


@given(UPDATES)
def test_load_update_comes_back(update: LoadUpdate) -> None:
    assert decode_load(encode(update)) == update


@given(SNAPSHOTS)
def test_snapshot_comes_back(snapshot: Snapshot) -> None:
    for sent in (snapshot, replace(snapshot, digest=None)):
        arrived = decode_snapshot(encode_snapshot(sent))
        assert list(arrived.hosted) == list(snapshot.hosted)
        assert replace(arrived, hosted=()) == replace(snapshot, hosted=())


@given(
    BATCHES | UPDATES | SNAPSHOTS.map(lambda snapshot: replace(snapshot, hashes=(), digest=None)), st.data()
)
@settings(max_examples=300)
def test_damaged_bytes_are_refused_or_well_formed(
    message: EventBatch | LoadUpdate | Snapshot, data: st.DataObject
) -> None:
    """Flipped, cut or lengthened: a WireError, or a message that keeps every promise; never another error."""
    wire = bytearray(encode_any(message))
    at = data.draw(st.integers(0, len(wire) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            wire[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del wire[at:]
        case "insert":
            wire[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    for decode in DECODERS:
        try:
            decoded = decode(bytes(wire))
        except WireError:
            continue
        assert decode(encode_any(decoded)) == decoded


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    assert_refused(noise)


KEYS = st.sampled_from(["type", "version", "epoch", "load", "hashes"])
LEAVES = st.none() | st.integers(-5, 5) | st.text(max_size=3)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
def test_other_msgpack_is_refused(value: object) -> None:
    assert_refused(msgspec.msgpack.encode(value))


def assert_refused(wire: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(wire)


def a_hash(name: int, twin: int) -> BlockHash:
    """`twin` tells apart hashes with the same hint."""
    return BlockHash(name.to_bytes(8, "little") + twin.to_bytes(8, "little"))


LOG_ACTS = st.lists(
    st.tuples(st.sampled_from(["toggle"] * 6 + ["flush", "join"]), st.integers(0, 5), st.integers(0, 1)),
    max_size=80,
)


def play(acts: list[tuple[str, int, int]], max_changes: int) -> None:
    with mock.patch.object(event_log, "MAX_CHANGES_PER_BATCH", max_changes):
        log, subscriber, cached = EventLog(epoch=7), Subscriber(), set[BlockHash]()
        for verb, name, twin in acts:
            block_hash = a_hash(name, twin)
            if verb == "toggle" and block_hash in cached:
                cached.remove(block_hash)
                log.removed(block_hash)
            elif verb == "toggle":
                cached.add(block_hash)
                log.stored(block_hash)
            elif verb == "flush":
                batch = decode_batch(encode(log.flush(Load())))
                assert len(batch.stored) + len(batch.removed) <= max_changes
                subscriber.apply(batch)
            else:  # pending changes must not be in the snapshot, nor be lost with it
                late = Subscriber()
                late.load(decode_snapshot(encode_snapshot(log.snapshot(Load()))))
                assert (late.hashes, late.seq, late.digest) == (subscriber.hashes, subscriber.seq, log.digest)
                subscriber = late
        while log.has_changes:
            subscriber.apply(log.flush(Load()))
        assert subscriber.hashes == {int.from_bytes(block_hash[:8], "little") for block_hash in cached}


@given(LOG_ACTS, st.sampled_from([1, 2, 500_000]))
@settings(max_examples=300)
def test_replay_is_the_content(acts: list[tuple[str, int, int]], max_changes: int) -> None:
    play(acts, max_changes)


@given(st.sets(U64), st.sets(U64))
def test_digest_follows_changes(before: set[HashHint], after: set[HashHint]) -> None:
    changed = digest_of(before).changed(after - before, before - after)
    assert changed == digest_of(after)
    assert digest_of(before).changed((), before) == Digest()
