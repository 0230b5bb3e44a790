"""Events' edges: caps, versions, strict types, order; random input is in `tests/property/test_events.py`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cache import event_log, event_wire
from cache.errors import WireError
from cache.event_log import EventLog
from cache.event_wire import decode_batch, decode_load, decode_snapshot, encode, encode_snapshot
from cache.events import (
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

QUEUED = QueuedPrompts("t", 2.0, 40.0, (-0.5, 0.1), (30, 200), 1, 900)
LOAD = Load(num_running=2, step_time=StepTimeModel(0.01, 1e-5, 1e-9, 1e-4), queued=(QUEUED,))


def hints(*names: int) -> tuple[HashHint, ...]:
    return tuple(map(HashHint, names))


def a_batch(**changes: Any) -> EventBatch:
    fields: dict[str, Any] = {
        "version": 6, "epoch": 2, "seq": 3, "stored": hints(4, 5), "removed": hints(6),
        "digest": Digest(2, 1), "load": LOAD,
    }  # fmt: skip
    return EventBatch(**{**fields, **changes})


def a_snapshot(**changes: Any) -> Snapshot:
    fields: dict[str, Any] = {"version": 6, "epoch": 2, "seq": 3, "hashes": hints(4, 5), "load": LOAD}
    return Snapshot(**{**fields, **changes})


def an_update(**changes: Any) -> LoadUpdate:
    fields: dict[str, Any] = {"version": 6, "epoch": 2, "seq": 3, "number": 1, "load": LOAD}
    return LoadUpdate(**{**fields, **changes})


def spoilt(wire: bytes, spoil: Callable[[dict[str, Any]], object]) -> bytes:
    value = msgspec.msgpack.decode(wire)
    spoil(value)
    return msgspec.msgpack.encode(value)


def spoil_queued(column: int, value: object) -> Callable[[dict[str, Any]], object]:
    """That of what is said of the first tenant's queue is something else."""
    return lambda message: message["load"]["queued"][0].__setitem__(column, value)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda value: value.update(surprise=1), "surprise"),
        (lambda value: value.pop("epoch"), "epoch"),
        (lambda value: value.update(seq="3"), r"\$\.seq"),
        (lambda value: value.update(seq=-1), r"\$\.seq"),
        (lambda value: value.update(stored=[1.0]), r"\$\.stored"),
        (lambda value: value.update(stored=[-1]), r"\$\.stored"),
        (lambda value: value.update(digest=[1, -1]), r"\$\.digest"),
        (lambda value: value["load"].update(num_running=True), r"\$\.load\.num_running"),
        (lambda value: value["load"].update(step_time=[math.nan, 0.0, 0.0, 0.0]), "step_time is not finite"),
        (lambda value: value["load"].update(step_time=[0.0, 0.0, math.inf, 0.0]), "step_time is not finite"),
        (spoil_queued(3, [0.1, -0.5]), "places that are not finite, or out of order"),
        (spoil_queued(3, [0.1, math.nan]), "places that are not finite, or out of order"),
        (spoil_queued(3, [0.1]), "load.queued has 1 places and tokens of 2 prompts"),
        (spoil_queued(4, [30, -1]), r"\$\.load\.queued\[0\]\[4\]"),
        (spoil_queued(2, -1.0), "load.queued has -1.0 tokens had"),
        (spoil_queued(2, math.nan), "load.queued has nan tokens had"),
        (spoil_queued(1, 0.0), "load.queued has a share of 0.0"),
        (spoil_queued(1, math.inf), "load.queued has a share of inf"),
        (lambda value: value["load"].update(queued=65 * value["load"]["queued"]), r"\$\.load\.queued"),
        (lambda value: value["load"].update(queued=2 * value["load"]["queued"]), "has 't' twice"),
        (lambda value: value["load"].update(num_waiting=1 << 60), r"\$\.load\.num_waiting"),
        (lambda value: value["load"].update(num_running=1 << 60), r"\$\.load\.num_running"),
        (lambda value: value.update(stored=[6, 7]), "listed twice"),
        (lambda value: value.update(stored=[7, 7]), "listed twice"),
        (lambda value: value.update(removed=[7, 7]), "listed twice"),
        (lambda value: value.update(stored=[8, 9, 10]), "adds more hashes than are held"),
        (lambda value: value.update(hosted=[8, 9, 10]), "adds more hashes than are held"),
        (lambda value: value.update(sent_s=math.inf), "sent_s is not finite"),
        (lambda value: value.update(version=3), "event batch of format version 3, not 6"),
        (lambda value: value.update(version=3, news=[]), "event batch of format version 3, not 6"),
        (lambda value: value.update(type="snapshot"), "type"),
    ],
)
def test_a_malformed_batch_is_refused_by_name(spoil: Callable[[dict[str, Any]], object], named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode_batch(spoilt(encode(a_batch()), spoil))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda value: value.update(digest=[3, 1]), "malformed snapshot: 16 bytes for 3 hashes"),
        (lambda value: value.update(num_hosted=3), "more hashes in host memory than in all"),
        (lambda value: value.pop("digest"), "digest"),
        (lambda value: value.update(version=0), "snapshot of format version 0, not 6"),
        (lambda value: value["load"].update(admitted=["r"] * 65_537), "admitted"),
        (lambda value: value["load"].update(ended=[["r", 0, 1]] * 4097), "ended"),
        (lambda value: value["load"].update(ended=[["r", 0, -1]]), "ended"),
    ],
)
def test_a_malformed_snapshot_is_refused_by_name(
    spoil: Callable[[dict[str, Any]], object], named: str
) -> None:
    head, hashes, hosted = encode_snapshot(a_snapshot())
    with pytest.raises(WireError, match=named):
        decode_snapshot([spoilt(head, spoil), hashes, hosted])


def test_a_snapshot_is_three_frames_of_whole_hashes() -> None:
    head, hashes, hosted = encode_snapshot(a_snapshot(hosted=hints(5)))
    assert hosted == (5).to_bytes(8, "little")
    assert hashes == (4).to_bytes(8, "little") + (5).to_bytes(8, "little")
    for frames in (
        *([], [head], [head, hashes], [head, hashes, b""], [head, hashes, hosted, b""]),
        *([head, hashes[:-1], hosted], [head, hashes + bytes(8), hosted], [head, hashes, hosted + bytes(8)]),
    ):
        with pytest.raises(WireError, match="snapshot"):
            decode_snapshot(frames)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda value: value.update(number=-1), r"\$\.number"),
        (lambda value: value.update(stored=[]), "stored"),
        (lambda value: value.update(version=3), "load update of format version 3, not 6"),
        (lambda value: value["load"].update(step_time=[math.nan, 0.0, 0.0, 0.0]), "step_time is not finite"),
    ],
)
def test_a_malformed_load_update_is_refused_by_name(
    spoil: Callable[[dict[str, Any]], object], named: str
) -> None:
    with pytest.raises(WireError, match=named):
        decode_load(spoilt(encode(an_update()), spoil))


def test_one_kind_is_not_taken_for_the_other() -> None:
    batch, update, snapshot = encode(a_batch()), encode(an_update()), encode_snapshot(a_snapshot())
    for wire in (update, snapshot[0]):
        with pytest.raises(WireError):
            decode_batch(wire)
    for wire in (batch, snapshot[0]):
        with pytest.raises(WireError):
            decode_load(wire)
    for wire in (batch, update):
        with pytest.raises(WireError):
            decode_snapshot([wire, snapshot[1]])


def test_size_caps_hold_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, update, snapshot = encode(a_batch()), encode(an_update()), encode_snapshot(a_snapshot())
    smallest = min(len(batch), len(update), len(snapshot[0]))
    calls: list[Callable[[], object]] = [
        lambda: decode_snapshot(snapshot),
        lambda: encode_snapshot(a_snapshot()),
    ]
    monkeypatch.setattr(event_wire, "MAX_SNAPSHOT_BYTES", len(snapshot[1]) - 1)
    for call in calls:
        with pytest.raises(WireError, match="bytes, at most"):
            call()
    monkeypatch.setattr(event_wire, "MAX_SNAPSHOT_BYTES", 1000)
    for message in (event_wire._BATCH, event_wire._LOAD, event_wire._HEAD):
        monkeypatch.setattr(message, "max_bytes", smallest - 1)
    calls += [
        lambda: decode_batch(batch),
        lambda: decode_load(update),
        lambda: encode(a_batch()),
        lambda: encode(an_update()),
    ]
    for call in calls:
        with pytest.raises(WireError, match="bytes, at most"):
            call()


@pytest.mark.parametrize("value", [1 << 64, object(), "\ud800"])
def test_what_cannot_be_sent_is_named(value: object) -> None:
    with pytest.raises(WireError, match="cannot encode event batch"):
        encode(a_batch(epoch=value))
    with pytest.raises(WireError, match="cannot encode snapshot"):
        encode_snapshot(a_snapshot(epoch=value))
    with pytest.raises(WireError, match="cannot encode snapshot"):
        encode_snapshot(a_snapshot(hashes=(value,)))


def test_the_largest_batch_fits_its_cap() -> None:
    """As many changes as `flush` puts into one, as long as a hint can be, with a crowd of request ids."""
    top = (1 << 64) - 1
    stored = hints(*range(top - event_log.MAX_CHANGES_PER_BATCH, top))
    names = [RequestId(f"{number:032x}") for number in range(65_536)]
    ended = tuple(RequestEnded(name, 1, 1 << 20) for name in names[:4096])
    load = Load(admitted=tuple(names), ended=ended)
    assert len(encode(a_batch(stored=stored, removed=(), load=load))) < event_wire.MAX_BATCH_BYTES


def a_hash(name: int) -> BlockHash:
    return BlockHash(name.to_bytes(8, "little") + bytes(8))


def test_batches_are_net_and_numbered() -> None:
    log = EventLog(epoch=9, clock=lambda: 77.5)
    for name in (1, 2, 3):
        log.stored(a_hash(name))
    log.removed(a_hash(3))
    first = log.flush(LOAD)
    assert first == EventBatch(6, 9, 1, hints(1, 2), (), Digest(2, 3), LOAD, sent_s=77.5)
    log.removed(a_hash(2))
    log.stored(a_hash(2))
    assert not log.has_changes
    heartbeat = log.flush(Load())
    assert (heartbeat.seq, heartbeat.stored, heartbeat.removed, heartbeat.digest) == (2, (), (), Digest(2, 3))
    log.removed(a_hash(2))
    assert log.has_changes
    assert log.flush(LOAD).removed == (2,)


def test_a_snapshot_shows_what_was_flushed() -> None:
    log = EventLog(epoch=9)
    log.stored(a_hash(1))
    assert log.snapshot(LOAD) == Snapshot(6, 9, 0, array("Q"), LOAD, Digest(), array("Q"))
    log.flush(LOAD)
    log.stored(a_hash(2))
    log.removed(a_hash(1))
    assert log.snapshot(LOAD) == Snapshot(6, 9, 1, array("Q", [1]), LOAD, Digest(1, 1), array("Q"))
    batch = log.flush(LOAD)
    assert (batch.stored, batch.removed) == (hints(2), hints(1))


def test_a_restored_hash_comes_after_its_parent_in_a_snapshot() -> None:
    log = EventLog(epoch=9)
    for name in (1, 2):
        log.stored(a_hash(name))
    log.flush(LOAD)
    log.removed(a_hash(2))
    log.removed(a_hash(1))
    log.flush(LOAD)
    log.stored(a_hash(3))
    log.stored(a_hash(1))
    log.stored(a_hash(2))
    log.flush(LOAD)
    assert list(log.snapshot(LOAD).hashes) == [3, 1, 2]


def test_a_hint_shared_by_two_hashes_stays_until_both_are_gone() -> None:
    log = EventLog(epoch=9)
    twin = BlockHash(a_hash(1)[:8] + b"\1" * 8)
    log.stored(a_hash(1))
    log.flush(LOAD)
    log.stored(twin)
    assert not log.has_changes
    log.removed(a_hash(1))
    assert not log.has_changes
    log.removed(twin)
    assert log.flush(LOAD).removed == (1,)
    assert log.digest == Digest()


def test_a_change_too_large_for_one_batch_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_CHANGES_PER_BATCH", 2)
    log = EventLog(epoch=9)
    for name in (1, 2):
        log.stored(a_hash(name))
    log.flush(LOAD)
    log.removed(a_hash(2))
    for name in (3, 4):
        log.stored(a_hash(name))
    first, second = log.flush(LOAD), log.flush(LOAD)
    assert (first.removed, first.stored, second.stored) == (hints(2), hints(3), hints(4))
    assert second.digest == digest_of(hints(1, 3, 4))
    assert not log.has_changes


def test_step_time_model() -> None:
    model = StepTimeModel(base_s=1.0, per_token_s=0.1, per_attention_s=0.01, per_sequence_s=0.5)
    assert model.step_s(new_tokens=10, attention=100.0, sequences=2) == pytest.approx(1 + 1 + 1 + 1)
    assert model.prefill_s(uncached=0, cached=64, max_batched_tokens=8) == 0.0
    # Three steps, each with its fixed costs; 20 queries see 10 cached keys and half of themselves.
    assert model.prefill_s(uncached=20, cached=10, max_batched_tokens=8) == pytest.approx(3 * 1.5 + 2 + 4)
