"""KV events: what a replica says about its blocks, numbered so that loss cannot go unnoticed.

A batch is *net*: a hash is in at most one of `stored`, `hosted` and `removed`, by where it is now: in the
pool, in host memory alone (`host_tier.py`), or nowhere. `epoch` names one life of one engine's cache; `seq`
counts its batches from 1. A subscriber that sees a gap in `seq` or a new `epoch` fetches a `Snapshot`.
Digests (count, XOR of hashes) of all that is held, and of what host memory alone holds, find silent drift. A
`LoadUpdate` tells of work that arrived between two batches; it changes no hash and is outside their order.
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
from operator import xor
from typing import Annotated, cast

import msgspec

from cache.block_hash import hint
from cache.errors import WireError
from cache.types import BlockHash, HashHint, RequestId
from cache.wire import WireFormat, within

FORMAT_VERSION = 5
MAX_BATCH_BYTES = 8 << 20
MAX_SNAPSHOT_BYTES = 256 << 20  # 32 M hashes
MAX_ADMITTED_PER_BATCH = 65_536
# At most 9 bytes each on the wire: leaves 3.5 MB of a batch for the load's request ids.
MAX_CHANGES_PER_BATCH = 500_000

# Running or waiting at one engine: Routers keep sums of them, of which ones without bound would leave errors.
MAX_REQUESTS = 1 << 24

# Of all tenants together: what a report says of a queue takes 2 KB, and a reader looks a place up in no time.
MAX_QUEUED_TOLD = 64

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)]
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


class QueuedPrompts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tenant's prompts that an engine has yet to compute, in its order; in columns, to look places up."""

    tenant: str
    share: float  # its part of the engine, beside other tenants'; above 0
    # Tokens, for its share, that it has had here beyond what a newcomer begins with (`tenant_shares.py`).
    had: float
    # Of the first of them, least first: in `SchedulingOrder.place`'s seconds, less that of a prompt of no
    # length that comes when this is said, so that nobody needs the engine's clock. None where no prompt that
    # has begun stands back for a shorter one: all of these are before whoever comes.
    places: tuple[float, ...] = ()
    tokens: tuple[NonNegative, ...] = ()  # to compute, of the prompt at each of these places
    num_more: NonNegative = 0  # prompts behind those
    more_tokens: NonNegative = 0  # to compute, of these


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's work at one moment."""

    queued_uncached_tokens: NonNegative = 0  # prompt tokens admitted or waiting, not yet computed
    # (query, key) pairs of those, in which a long prompt's last chunk outweighs a hundred short prompts of
    # its length; None: not counted, a reader has to guess from the tokens.
    queued_attention: NonNegative | None = None
    # Whose those are, and in which order they are computed; of `MAX_QUEUED_TOLD` tenants at most, each once.
    queued: Annotated[tuple[QueuedPrompts, ...], msgspec.Meta(max_length=MAX_QUEUED_TOLD)] = ()
    num_waiting: Requests = 0
    num_running: Requests = 0
    context_tokens: NonNegative = 0  # of all running sequences
    free_blocks: NonNegative = 0  # blocks not referenced by a running sequence or a held prefix
    # Of the free ones, those kept for what running sequences are expected to take; 0 while half are free.
    growth_blocks: NonNegative = 0
    total_blocks: NonNegative = 0
    is_draining: bool = False
    step_time: StepTimeModel | None = None  # None until the fit has enough samples
    # Seconds to copy a block back from host memory, measured; None: it has none, or has not copied yet.
    copy_block_s: float | None = None
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
    stored: Hints  # in the pool now, and were not; parents before children
    removed: Hints  # children before parents; a subscriber applies them first
    digest: Digest  # of the whole cache after this batch, host memory included
    load: Load
    sent_s: float = 0.0  # when it was made, on the sender's own clock: only differences mean anything
    # In host memory alone now, and were not. Where a change needs several batches, those that were in the
    # pool come before `stored`, children first; the others after it, parents first.
    hosted: Hints = ()
    host_digest: Digest = Digest()  # of what host memory alone holds


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
    hosted: Sequence[HashHint] = ()  # of the hashes, those that host memory alone holds


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


class EventLog:
    """The engine's side: turns the cache's announcements into numbered, net batches.

    A `TierEventSink`. Owned by the engine thread; what it returns is immutable and may go anywhere.
    Changes wait until `flush` and are in no snapshot before: `snapshot` shows the cache as of the
    last batch, so a subscriber that applies it and then later batches sees every change once.
    """

    def __init__(self, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        """epoch: names this life of the cache; unlike any earlier one of this replica, 64 bits."""
        self.epoch = epoch
        self._clock = clock
        self.seq = 0  # of the last batch flushed
        self.digest = self.host_digest = Digest()  # of `_published`, and of what of it is hosted
        # As of `seq`: whether host memory alone holds it. In an order with parents before children.
        self._published: dict[HashHint, bool] = {}
        # Block hashes held now per hint, and those of them that host memory alone holds: two of them may
        # share their low 64 bits, by chance or malice, and the hint must stay until both are gone.
        self._num_hashes: dict[HashHint, int] = {}
        self._num_hosted: dict[HashHint, int] = {}
        # What differs from `_published`, and where it is now; None = nowhere. In order of the last change, so
        # that (since the cache keeps parents of what it keeps) stored parents precede children, and what has
        # left the pool or the cache follows them.
        self._changed: dict[HashHint, bool | None] = {}

    # `TierEventSink`; each O(1).

    def stored(self, block_hash: BlockHash) -> None:
        """The first copy of `block_hash` is in the pool, and host memory has none."""
        name = hint(block_hash)
        self._num_hashes[name] = self._num_hashes.get(name, 0) + 1
        self._note(name)

    def removed(self, block_hash: BlockHash) -> None:
        """The last copy of `block_hash` has left the pool, and host memory has none."""
        name = hint(block_hash)
        _count_down(self._num_hashes, name)
        self._note(name)

    def demoted(self, block_hash: BlockHash) -> None:
        """It has left the pool and is in host memory."""
        name = hint(block_hash)
        self._num_hosted[name] = self._num_hosted.get(name, 0) + 1
        self._note(name)

    def promoted(self, block_hash: BlockHash) -> None:
        """It was in host memory alone and is in the pool."""
        name = hint(block_hash)
        _count_down(self._num_hosted, name)
        self._note(name)

    def dropped(self, block_hash: BlockHash) -> None:
        """It was in host memory alone and is gone."""
        name = hint(block_hash)
        _count_down(self._num_hosted, name)
        _count_down(self._num_hashes, name)
        self._note(name)

    @property
    def has_changes(self) -> bool:
        """Whether the next batch would say more than a heartbeat."""
        return bool(self._changed)

    def flush(self, load: Load) -> EventBatch:
        """The next batch: the changes since the last one, or a heartbeat. O(changes).

        A change too large for one batch goes in several: `has_changes` stays true. Removals go first,
        so that a cut leaves no child without its parent at the subscriber, in the pool or over both tiers.
        """
        removed: list[HashHint] = []
        stored: list[HashHint] = []
        demoted: list[HashHint] = []
        new_hosted: list[HashHint] = []
        for name, is_hosted in self._changed.items():
            if is_hosted is None:
                removed.append(name)
            elif not is_hosted:
                stored.append(name)
            else:
                (demoted if name in self._published else new_hosted).append(name)
        new_hosted.reverse()  # they came children first
        left = MAX_CHANGES_PER_BATCH
        for part in (removed, demoted, stored, new_hosted):
            del part[left:]
            left -= len(part)
        hosted = demoted + new_hosted
        self._publish(removed, stored, hosted)
        self.seq += 1
        return EventBatch(
            version=FORMAT_VERSION,
            epoch=self.epoch,
            seq=self.seq,
            stored=tuple(stored),
            removed=tuple(removed),
            digest=self.digest,
            load=load,
            sent_s=self._clock(),
            hosted=tuple(hosted),
            host_digest=self.host_digest,
        )

    def snapshot(self, load: Load) -> Snapshot:
        """The whole cache as of the last batch; changes nothing. O(cached)."""
        hashes = _as_hints(array("Q", self._published))
        hosted = [name for name, is_hosted in self._published.items() if is_hosted]
        packed = _as_hints(array("Q", hosted))
        return Snapshot(FORMAT_VERSION, self.epoch, self.seq, hashes, load, self.digest, packed)

    def _note(self, name: HashHint) -> None:
        total = self._num_hashes.get(name, 0)
        now = None if not total else self._num_hosted.get(name, 0) == total
        self._changed.pop(name, None)
        if self._published.get(name) is not now:
            self._changed[name] = now

    def _publish(
        self, removed: Sequence[HashHint], stored: Sequence[HashHint], hosted: Sequence[HashHint]
    ) -> None:
        published = self._published
        new = [name for name in (*stored, *hosted) if name not in published]
        unhosted = [name for name in (*removed, *stored) if published.get(name)]
        self.digest = self.digest.changed(new, removed)
        self.host_digest = self.host_digest.changed(hosted, unhosted)
        for name in removed:
            del published[name]
        published.update(dict.fromkeys(stored, False))
        published.update(dict.fromkeys(hosted, True))
        for name in (*removed, *stored, *hosted):
            del self._changed[name]


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
        return _as_hints(_little_endian(hashes))
    return cast("Sequence[HashHint]", memoryview(packed).cast("Q"))


def _as_hints(packed: array[int]) -> Sequence[HashHint]:
    """Packed u64 as what they are: eight bytes each where a tuple of ints takes forty."""
    return cast("Sequence[HashHint]", packed)


def _count_down(counts: dict[HashHint, int], name: HashHint) -> None:
    """One less; what is zero is not kept."""
    if counts[name] > 1:
        counts[name] -= 1
    else:
        del counts[name]
