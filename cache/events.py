"""KV events: what a replica says about its blocks, numbered so that loss cannot go unnoticed.

A batch is *net*: a hash is in at most one of `stored` and `removed`. `epoch` names one life of
one engine's cache; `seq` counts its batches from 1. A subscriber that sees a gap in `seq` or a new
`epoch` fetches a `Snapshot`. The digest (count, XOR of hashes) finds silent drift. A `LoadUpdate` tells of
work that arrived between two batches; it changes no hash and has no place in their order.
On the wire: msgpack with strict types and size caps, never pickle; a snapshot's hashes as packed u64, so
that a million of them arrive in a millisecond.
Knows bytes and hashes; knows no sockets (`replica/publisher.py`, `router/events/subscriber.py`).
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import xor
from typing import Annotated, cast

import msgspec

from cache.block_hash import hint
from cache.errors import WireError
from cache.types import BlockHash, HashHint, RequestId
from cache.wire import WireFormat, within

FORMAT_VERSION = 3
MAX_BATCH_BYTES = 8 << 20
MAX_SNAPSHOT_BYTES = 256 << 20  # 32 M hashes
MAX_ADMITTED_PER_BATCH = 65_536
# At most 9 bytes each on the wire: leaves 3.5 MB of a batch for the load's request ids.
MAX_CHANGES_PER_BATCH = 500_000

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself carries nothing above 64 bits
Hints = tuple[Annotated[HashHint, msgspec.Meta(ge=0)], ...]


class StepTimeModel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Fitted seconds of one engine step: fixed + per token + attention + per sequence.

    step_s = base_s + per_token_s * new_tokens
           + per_attention_s * sum(new_i * (context_i + new_i / 2)) + per_sequence_s * sequences
    """

    base_s: float
    per_token_s: float
    per_attention_s: float  # per (query token x key token)
    per_sequence_s: float

    def step_s(self, new_tokens: int, attention: float, sequences: int) -> float:
        return (
            self.base_s
            + self.per_token_s * new_tokens
            + self.per_attention_s * attention
            + self.per_sequence_s * sequences
        )

    def prefill_s(self, uncached: int, cached: int, max_batched_tokens: int) -> float:
        """Seconds to prefill `uncached` tokens after `cached` ones, alone on the engine, in chunks."""
        if uncached <= 0:
            return 0.0
        steps = -(-uncached // max_batched_tokens)
        attention = uncached * (cached + uncached / 2)
        return (
            steps * (self.base_s + self.per_sequence_s)
            + self.per_token_s * uncached
            + self.per_attention_s * attention
        )


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's work at one moment."""

    queued_uncached_tokens: NonNegative = 0  # prompt tokens admitted or waiting, not yet computed
    # (query, key) pairs of those, in which a long prompt's last chunk outweighs a hundred short prompts of
    # its length; None: not counted, a reader has to guess from the tokens.
    queued_attention: NonNegative | None = None
    num_waiting: NonNegative = 0
    num_running: NonNegative = 0
    context_tokens: NonNegative = 0  # of all running sequences
    free_blocks: NonNegative = 0  # blocks not referenced by a running sequence or a held prefix
    # Of the free ones, those kept for what running sequences are expected to take; 0 while half are free.
    growth_blocks: NonNegative = 0
    total_blocks: NonNegative = 0
    is_draining: bool = False
    step_time: StepTimeModel | None = None  # None until the fit has enough samples
    # Request ids the engine has taken in since the last batch: routers drop their reservations.
    admitted: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=MAX_ADMITTED_PER_BATCH)] = ()


class Digest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a set of hash hints: equal sets have equal digests, drifted ones almost surely not."""

    count: NonNegative = 0
    xor: U64 = 0

    def changed(self, stored: Collection[HashHint], removed: Collection[HashHint]) -> Digest:
        """Digest of the set after the change. `stored` were not in it, `removed` were. O(changes)."""
        return Digest(
            self.count + len(stored) - len(removed), reduce(xor, removed, reduce(xor, stored, self.xor))
        )


def digest_of(hashes: Collection[HashHint]) -> Digest:
    """Digest of a set of hints, each listed once."""
    return Digest().changed(hashes, ())


class EventBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="batch"):
    """What changed since batch `seq - 1` of the same epoch. A heartbeat has no hashes."""

    version: int
    epoch: U64
    seq: NonNegative
    stored: Hints  # parents before children
    removed: Hints  # children before parents; a subscriber applies them before `stored`
    digest: Digest  # of the whole cache after this batch
    load: Load
    sent_s: float = 0.0  # when it was made, on the sender's own clock: only differences mean anything


class LoadUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load"):
    """The load now, between two batches: what arrived while the engine was inside a step is in it.

    `load.admitted` names requests that no batch has named yet; one will, so losing an update loses nothing.
    """

    version: int
    epoch: U64
    seq: NonNegative  # of the last batch sent before
    number: NonNegative  # of this update among those after that batch, from 1
    load: Load


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All hashes cached after batch `seq`, with the load at that moment."""

    version: int
    epoch: int
    seq: int
    hashes: Sequence[HashHint]  # parents before children; packed u64 (`array("Q")`) off the wire
    load: Load
    digest: Digest | None = None  # of the hashes; None = not known yet, `encode_snapshot` works it out


def encode(message: EventBatch | LoadUpdate) -> bytes:
    """The message as msgpack. Raises WireError if no receiver would take it: too large, a wrong type."""
    return _BATCH.encode(message) if isinstance(message, EventBatch) else _LOAD.encode(message)


def encode_snapshot(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """The snapshot in two frames, its head as msgpack and its hashes as little-endian u64.

    Raises WireError if no receiver would take it.
    """
    try:
        hashes = array("Q", snapshot.hashes)
    except (TypeError, OverflowError) as error:
        raise WireError(f"cannot encode snapshot: {error}") from error
    digest = snapshot.digest if snapshot.digest is not None else digest_of(snapshot.hashes)
    head = _SnapshotHead(snapshot.version, snapshot.epoch, snapshot.seq, digest, snapshot.load)
    return (
        _HEAD.encode(head),
        within(_little_endian(hashes).tobytes(), MAX_SNAPSHOT_BYTES, "snapshot"),
    )


def decode_batch(wire: bytes) -> EventBatch:
    """Inverse of `encode`. Raises WireError, naming what is wrong, for everything else."""
    batch = _BATCH.decode(wire)
    _check_load(batch.load, "event batch")
    names = (*batch.stored, *batch.removed)
    if len(set(names)) != len(names):
        raise WireError("malformed event batch: a hash is listed twice")
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
    if len(frames) != 2:
        raise WireError(f"snapshot in {len(frames)} frames, not 2")
    head = _HEAD.decode(frames[0])
    _check_load(head.load, "snapshot")
    packed = within(frames[1], MAX_SNAPSHOT_BYTES, "snapshot")
    if len(packed) != 8 * head.digest.count:
        raise WireError(f"malformed snapshot: {len(packed)} bytes for {head.digest.count} hashes")
    return Snapshot(head.version, head.epoch, head.seq, _unpacked(packed), head.load, head.digest)


class EventLog:
    """The engine's side: turns the pool's announcements into numbered, net batches.

    A `BlockEventSink`. Owned by the engine thread; what it returns is immutable and may go anywhere.
    Changes wait until `flush` and are in no snapshot before: `snapshot` shows the cache as of the
    last batch, so a subscriber that applies it and then later batches sees every change once.
    """

    def __init__(self, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        """epoch: names this life of the cache; unlike any earlier one of this replica, 64 bits."""
        self.epoch = epoch
        self._clock = clock
        self.seq = 0  # of the last batch flushed
        self.digest = Digest()  # of `_published`
        self._published: dict[HashHint, None] = {}  # as of `seq`, in an order with parents before children
        # Block hashes cached now per hint: two of them may share their low 64 bits, by chance or malice,
        # and the hint must stay until both are gone.
        self._num_hashes: dict[HashHint, int] = {}
        # Net changes since `seq`, disjoint. Each in order of its last change, so that (since the cache
        # keeps parents of what it keeps) stored parents precede children and removed ones follow them.
        self._stored: dict[HashHint, None] = {}
        self._removed: dict[HashHint, None] = {}

    def stored(self, block_hash: BlockHash) -> None:
        """The first copy of `block_hash` is in the cache. O(1)."""
        name = hint(block_hash)
        count = self._num_hashes.get(name, 0)
        self._num_hashes[name] = count + 1
        if count:
            return
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def removed(self, block_hash: BlockHash) -> None:
        """The last copy of `block_hash` is gone. O(1)."""
        name = hint(block_hash)
        count = self._num_hashes[name]
        if count > 1:
            self._num_hashes[name] = count - 1
            return
        del self._num_hashes[name]
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    @property
    def has_changes(self) -> bool:
        """Whether the next batch would say more than a heartbeat."""
        return bool(self._stored or self._removed)

    def flush(self, load: Load) -> EventBatch:
        """The next batch: the changes since the last one, or a heartbeat. O(changes).

        A change too large for one batch goes in several: `has_changes` stays true. Removals go first,
        so that a cut leaves no child without its parent at the subscriber.
        """
        removed = _take(self._removed, MAX_CHANGES_PER_BATCH)
        stored = _take(self._stored, MAX_CHANGES_PER_BATCH - len(removed))
        for name in removed:
            del self._published[name]
        self._published.update(dict.fromkeys(stored))
        self.digest = self.digest.changed(stored, removed)
        self.seq += 1
        return EventBatch(
            FORMAT_VERSION, self.epoch, self.seq, stored, removed, self.digest, load, self._clock()
        )

    def snapshot(self, load: Load) -> Snapshot:
        """The whole cache as of the last batch; changes nothing. O(cached)."""
        hashes = _as_hints(array("Q", self._published))
        return Snapshot(FORMAT_VERSION, self.epoch, self.seq, hashes, load, self.digest)


class _SnapshotHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="snapshot"):
    """A snapshot without its hashes."""

    version: int
    epoch: U64
    seq: NonNegative
    digest: Digest
    load: Load


_BATCH = WireFormat(EventBatch, "event batch", version=FORMAT_VERSION, max_bytes=MAX_BATCH_BYTES)
_LOAD = WireFormat(LoadUpdate, "load update", version=FORMAT_VERSION, max_bytes=MAX_BATCH_BYTES)
_HEAD = WireFormat(_SnapshotHead, "snapshot", version=FORMAT_VERSION, max_bytes=MAX_BATCH_BYTES)


def _check_load(load: Load, name: str) -> None:
    """Raises WireError for what the types alone do not rule out."""
    if load.step_time is not None and not all(map(math.isfinite, msgspec.structs.astuple(load.step_time))):
        raise WireError(f"malformed {name}: load.step_time is not finite")


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
        return _as_hints(_little_endian(hashes))
    return cast("Sequence[HashHint]", memoryview(packed).cast("Q"))


def _as_hints(packed: array[int]) -> Sequence[HashHint]:
    """Packed u64 as what they are: eight bytes each where a tuple of ints takes forty."""
    return cast("Sequence[HashHint]", packed)


def _take(pending: dict[HashHint, None], limit: int) -> tuple[HashHint, ...]:
    taken = tuple(islice(pending, limit))
    if len(taken) == len(pending):
        pending.clear()
    else:
        for name in taken:
            del pending[name]
    return taken
