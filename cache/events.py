"""KV events: what a replica says about its blocks, numbered so that loss cannot go unnoticed.

A batch is *net*: a hash is in at most one of `stored`, `hosted` and `removed`, by where it is now: in the
pool, in host memory alone (`host_tier.py`), or nowhere. `epoch` names one life of one engine's cache; `seq`
counts its batches from 1. A subscriber that sees a gap in `seq` or a new `epoch` fetches a `Snapshot`.
Digests (count, XOR of hashes) of all that is held, and of what host memory alone holds, find silent drift. A
`LoadUpdate` tells of work that arrived between two batches; it changes no hash and is outside their order.
Values: made by `event_log.py`, carried by `event_wire.py`. Knows hashes and loads; knows no bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from typing import Annotated, cast

import msgspec

from cache.types import HashHint, RequestId

FORMAT_VERSION = 6
MAX_ADMITTED_PER_BATCH = 65_536
MAX_ENDED_PER_BATCH = 4096  # of the others the next one tells, which follows at once
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


class StepTimeModel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
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


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A request that an engine computes no more, whatever the reason and whoever has read its answers."""

    request_id: RequestId
    attempt: NonNegative  # of a Router's at it: `GenerateRequest.attempt`
    num_tokens: NonNegative  # of all its answers, computed in this attempt


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
    total_blocks: NonNegative = 0  # without those of held prefixes, which nobody who runs takes or gives back
    is_draining: bool = False
    step_time: StepTimeModel | None = None  # None until the fit has enough samples
    # Seconds to copy a block back from host memory, measured; None: it has none, or has not copied yet.
    copy_block_s: float | None = None
    # Request ids the engine has taken in since the last batch, or that are at its door and were in no other
    # message yet: they are counted here, and routers drop their reservations.
    admitted: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=MAX_ADMITTED_PER_BATCH)] = ()
    # Of those that were taken in, the ones that have ended since the last batch. Whoever sent them may not
    # have been told otherwise: streams that nobody reads are held back at the replica.
    ended: Annotated[tuple[RequestEnded, ...], msgspec.Meta(max_length=MAX_ENDED_PER_BATCH)] = ()


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


def as_hints(packed: array[int]) -> Sequence[HashHint]:
    """Packed u64 as what they are: eight bytes each where a tuple of ints takes forty."""
    return cast("Sequence[HashHint]", packed)
