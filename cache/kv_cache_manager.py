"""Which blocks a sequence uses: lookup, admission, growth, release.

The scheduler's only door to the cache. Knows token ids, block ids and hashes; knows no tensors.
Not thread-safe: engine thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache.block_hash import BlockHasher, ExtraKeys
from cache.types import BlockHash


class BlockEventSink(Protocol):
    """Told when the first copy of a hash is cached and when the last one goes. Must not block."""

    def stored(self, block_hash: BlockHash) -> None: ...
    def removed(self, block_hash: BlockHash) -> None: ...


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One sequence's claim on the cache. Written by `KVCacheManager` alone; others read.

        [0, hit) shared from the cache   [hit, full) ours, hashed   [full, end) ours, no hash yet
    """

    token_ids: array[int]  # prompt + output; shared with the request, which appends to it
    root: BlockHash
    extra_keys: ExtraKeys = field(default_factory=dict)
    block_table: list[int] = field(default_factory=list)  # block ids in token order; only grows
    block_hashes: list[BlockHash] = field(default_factory=list)  # of full blocks hashed so far


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading blocks of a sequence that the cache holds, verified token by token."""

    block_ids: tuple[int, ...]
    num_tokens: int  # len(block_ids) * block_size, at most len(token_ids) - 1
    num_idle: int  # of those, blocks waiting in the free queue: they stop being free when taken


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot for metrics and tests. free + used == total, always."""

    total: int
    free: int  # in the free queue, cached content included
    used: int  # referenced by at least one sequence
    cached: int  # blocks with a registered hash, duplicates included


class KVCacheManager:
    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        *,
        block_size: int,
        prefix_caching: bool = True,
        sink: BlockEventSink | None = None,
    ) -> None:
        raise NotImplementedError

    def begin(
        self,
        token_ids: array[int],
        *,
        salt: str = "",
        adapter: str = "",
        adapter_digest: str = "",
        extra_keys: ExtraKeys | None = None,
        block_hashes: Sequence[BlockHash] = (),
    ) -> SequenceBlocks:
        """A sequence that holds no blocks yet.

        `block_hashes` sent by a router save hashing; they are taken only if the first one equals
        what this engine computes itself (another root or salt would not), else all are recomputed.
        """
        raise NotImplementedError

    def match(self, sequence: SequenceBlocks) -> PrefixHit:
        """Longest cached prefix of the sequence, capped so that at least one token is computed.

        Changes nothing but the sequence's lazily computed hashes. O(blocks matched).
        With `prefix_caching=False`: an empty hit, and nothing is hashed.
        """
        raise NotImplementedError

    def blocks_needed(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that `admit(sequence, hit, num_tokens)` would take, idle hit blocks included."""
        raise NotImplementedError

    def admit(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        """Take the hit's blocks and allocate for `num_tokens` tokens after it; register full ones.

        Raises NoFreeBlocks and changes nothing when they do not fit.
        """
        raise NotImplementedError

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Make room for the first `num_tokens` tokens of the sequence in all; register full ones.

        Tokens [0, num_tokens) must be in `token_ids`: they are computed in the coming step.
        Raises NoFreeBlocks and changes nothing when they do not fit.
        """
        raise NotImplementedError

    def release(self, sequence: SequenceBlocks) -> None:
        """Give back every block, last first, so that tails are evicted before their prefixes.

        Content stays cached. Idempotent. The sequence may be matched and admitted again.
        """
        raise NotImplementedError

    def commit_step(self) -> None:
        """The step's forward succeeded: what was registered since the last commit is computed."""
        raise NotImplementedError

    def abort_step(self) -> None:
        """The step's forward failed: un-register every block registered since the last commit.

        Sequences that took such blocks must be released (or restarted) by the caller.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all cached content (no sequence may hold blocks). Emits removals."""
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        raise NotImplementedError

    def stats(self) -> CacheStats:
        raise NotImplementedError
