"""KV events: what a replica says about its blocks, numbered so that loss cannot go unnoticed.

A batch is *net*: a hash is in at most one of `stored` and `removed`. `epoch` names one life of
one engine's cache; `seq` counts its batches from 1. A subscriber that sees a gap in `seq` or a new
`epoch` fetches a `Snapshot`. The digest (count, XOR of hashes) finds silent drift.
On the wire: msgpack with strict types and size caps, never pickle.
Knows bytes and hashes; knows no sockets (`replica/publisher.py`, `router/subscriber.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from cache.types import HashHint, RequestId

FORMAT_VERSION = 1
MAX_BATCH_BYTES = 8 << 20
MAX_SNAPSHOT_BYTES = 256 << 20  # 16 M hashes
MAX_ADMITTED_PER_BATCH = 65_536

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
U64 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 64)]


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
    num_waiting: NonNegative = 0
    num_running: NonNegative = 0
    context_tokens: NonNegative = 0  # of all running sequences
    free_blocks: NonNegative = 0  # blocks not referenced by a running sequence
    total_blocks: NonNegative = 0
    is_draining: bool = False
    step_time: StepTimeModel | None = None  # None until the fit has enough samples
    # Request ids the engine has taken in since the last batch: routers drop their reservations.
    admitted: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=MAX_ADMITTED_PER_BATCH)] = ()


class Digest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a set of hash hints: equal sets have equal digests, drifted ones almost surely not."""

    count: NonNegative = 0
    xor: U64 = 0


class EventBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="batch"):
    """What changed since batch `seq - 1` of the same epoch. A heartbeat has no hashes."""

    version: int
    epoch: U64
    seq: NonNegative
    stored: tuple[HashHint, ...]
    removed: tuple[HashHint, ...]
    digest: Digest  # of the whole cache after this batch
    load: Load


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="snapshot"):
    """All hashes cached after batch `seq`, parents before children, with the load at that moment."""

    version: int
    epoch: U64
    seq: NonNegative
    hashes: tuple[HashHint, ...]
    load: Load
