"""KV events as bytes: msgpack with strict types and size caps, never pickle.

A snapshot's hashes are packed u64, so that a million of them arrive in a millisecond.
Knows bytes and events; knows no sockets (`replica/publisher.py`, `router/events/subscriber.py`).
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import cast

import msgspec

from cache.errors import WireError
from cache.events import (
    FORMAT_VERSION,
    U64,
    Digest,
    EventBatch,
    Load,
    LoadUpdate,
    NonNegative,
    QueuedPrompts,
    Snapshot,
    as_hints,
    digest_of,
)
from cache.types import HashHint
from cache.wire import WireFormat, within

MAX_BATCH_BYTES = 8 << 20
MAX_SNAPSHOT_BYTES = 256 << 20  # 32 M hashes


def encode(message: EventBatch | LoadUpdate) -> bytes:
    """The message as msgpack. Raises WireError if no receiver would take it: too large, a wrong type."""
    return _BATCH.encode(message) if isinstance(message, EventBatch) else _LOAD.encode(message)


def encode_snapshot(snapshot: Snapshot) -> tuple[bytes, bytes, bytes]:
    """The snapshot in three frames: its head as msgpack; all hashes, and those of host memory alone, as
    little-endian u64.

    Raises WireError if no receiver would take it.
    """
    try:
        hashes, hosted = array("Q", snapshot.hashes), array("Q", snapshot.hosted)
    except (TypeError, OverflowError) as error:
        raise WireError(f"cannot encode snapshot: {error}") from error
    digest = snapshot.digest if snapshot.digest is not None else digest_of(snapshot.hashes)
    head = _SnapshotHead(snapshot.version, snapshot.epoch, snapshot.seq, digest, len(hosted), snapshot.load)
    return (
        _HEAD.encode(head),
        within(_little_endian(hashes).tobytes(), MAX_SNAPSHOT_BYTES, "snapshot"),
        within(_little_endian(hosted).tobytes(), MAX_SNAPSHOT_BYTES, "snapshot"),
    )


def decode_batch(wire: bytes) -> EventBatch:
    """Inverse of `encode`. Raises WireError, naming what is wrong, for everything else."""
    batch = _BATCH.decode(wire)
    _check_load(batch.load, "event batch")
    names = (*batch.stored, *batch.hosted, *batch.removed)
    if len(set(names)) != len(names):
        raise WireError("malformed event batch: a hash is listed twice")
    # By their digests receivers bound what they keep of a cache.
    if len(batch.stored) + len(batch.hosted) > batch.digest.count:
        raise WireError("malformed event batch: it adds more hashes than are held")
    if not math.isfinite(batch.sent_s):
        raise WireError("malformed event batch: sent_s is not finite")
    return batch


def decode_load(wire: bytes) -> LoadUpdate:
    """Inverse of `encode`. Raises WireError, naming what is wrong, for everything else."""
    update = _LOAD.decode(wire)
    _check_load(update.load, "load update")
    return update


def decode_snapshot(frames: Sequence[bytes | memoryview]) -> Snapshot:
    """Inverse of `encode_snapshot`; quick, whatever its size. Raises WireError for everything else.

    That no hash is listed twice or missing shows when they are applied: by the digest.
    """
    if len(frames) != 3:
        raise WireError(f"snapshot in {len(frames)} frames, not 3")
    head = _HEAD.decode(frames[0])
    _check_load(head.load, "snapshot")
    if head.num_hosted > head.digest.count:
        raise WireError("malformed snapshot: more hashes in host memory than in all")
    columns = []
    for frame, count in zip(frames[1:], (head.digest.count, head.num_hosted), strict=True):
        packed = within(frame, MAX_SNAPSHOT_BYTES, "snapshot")
        if len(packed) != 8 * count:
            raise WireError(f"malformed snapshot: {len(packed)} bytes for {count} hashes")
        columns.append(_unpacked(packed))
    hashes, hosted = columns
    return Snapshot(head.version, head.epoch, head.seq, hashes, head.load, head.digest, hosted)


class _SnapshotHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="snapshot"):
    """A snapshot without its hashes."""

    version: int
    epoch: U64
    seq: NonNegative
    digest: Digest
    num_hosted: NonNegative
    load: Load


_BATCH = WireFormat(EventBatch, "event batch", version=FORMAT_VERSION, max_bytes=MAX_BATCH_BYTES)
_LOAD = WireFormat(LoadUpdate, "load update", version=FORMAT_VERSION, max_bytes=MAX_BATCH_BYTES)
_HEAD = WireFormat(_SnapshotHead, "snapshot", version=FORMAT_VERSION, max_bytes=MAX_BATCH_BYTES)


def _check_load(load: Load, name: str) -> None:
    """Raises WireError for what the types alone do not rule out."""
    if load.step_time is not None and not all(map(math.isfinite, msgspec.structs.astuple(load.step_time))):
        raise WireError(f"malformed {name}: load.step_time is not finite")
    if load.copy_block_s is not None and not 0 <= load.copy_block_s < math.inf:
        raise WireError(f"malformed {name}: load.copy_block_s is {load.copy_block_s}")
    if load.queued:
        _check_queued(load.queued, name)


def _check_queued(queued: Sequence[QueuedPrompts], name: str) -> None:
    tenants = set[str]()
    for of in queued:
        if of.tenant in tenants:
            raise WireError(f"malformed {name}: load.queued has {of.tenant!r} twice")
        tenants.add(of.tenant)
        places = of.places
        if len(places) != len(of.tokens):
            told = f"{len(places)} places and tokens of {len(of.tokens)} prompts"
            raise WireError(f"malformed {name}: load.queued has {told}")
        if not all(map(math.isfinite, places)) or list(places) != sorted(places):
            raise WireError(f"malformed {name}: load.queued has places that are not finite, or out of order")
        if not 0.0 < of.share < math.inf:
            raise WireError(f"malformed {name}: load.queued has a share of {of.share}")
        if not 0.0 <= of.had < math.inf:
            raise WireError(f"malformed {name}: load.queued has {of.had} tokens had")


def _little_endian(hashes: array[int]) -> array[int]:
    """In or out of the wire's byte order: the same either way. Swaps in place."""
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes


def _unpacked(packed: bytes | memoryview) -> Sequence[HashHint]:
    """The hashes where they lie: a view, so that however many there are, nothing waits for a copy."""
    if sys.byteorder == "big":
        hashes: array[int] = array("Q")
        hashes.frombytes(packed)
        return as_hints(_little_endian(hashes))
    return cast("Sequence[HashHint]", memoryview(packed).cast("Q"))
