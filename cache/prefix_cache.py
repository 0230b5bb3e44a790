"""What a scheduler asks of a cache, whatever its discipline (`disciplines.py`). Knows none of them."""

from __future__ import annotations

from array import array
from typing import Protocol

from cache.cache_stats import CacheStats
from cache.sequence_blocks import PrefixHit, SequenceBlocks


class PrefixCache(Protocol):
    """One pool of K/V memory and every sequence that it began. Engine thread only; nothing blocks.

    One engine step: `match`, `admit`, `grow`, `fork`, `release` (= preempt) of the sequences to schedule; the
    forward; `commit_step` or `abort_step`; `release` of those that are finished or failed.
    A sequence is scheduled once a step. What is computed is found by others of the same step; until the
    commit it is a promise.
    Only `commit_step` may change entries of a block table; else a table grows, until it is released.
    """

    @property
    def block_size(self) -> int:
        """Tokens per block; 1 for a cache that shares to the token."""

    @property
    def prefix_caching(self) -> bool:
        """Whether what was computed is found again at all."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, cached content included. O(1)."""

    def begin(self, token_ids: array[int], *, salt: str = "", looks_up: bool = True) -> SequenceBlocks:
        """A sequence that holds no blocks yet. Another salt shares nothing with it."""

    def match(self, sequence: SequenceBlocks) -> PrefixHit:
        """Longest cached prefix, at least one token short of the whole. Evicts nothing, takes nothing.

        O(tokens matched).
        """

    def allow_hits(self, sequence: SequenceBlocks) -> None:
        """From its next `match` on it looks up, as any does that was not begun without. O(1)."""

    def new_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens after a hit. O(1)."""

    def blocks_needed(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that `admit` would take, those of the hit that nobody uses included. O(1)."""

    def admit(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        """Take the hit's blocks and room for `num_tokens` tokens after it. O(blocks).

        Raises NoFreeBlocks when they do not fit, StaleHit when the hit has been evicted in part since
        `match`; changes nothing then.
        """

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Room for the first `num_tokens` tokens in all. Raises NoFreeBlocks and changes nothing. O(new)."""

    def reserve(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Room for so many tokens in all, none of them promised: the `grow` to as many takes no more.

        Raises NoFreeBlocks and changes nothing. O(new).
        """

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> None:
        """Let a child begin with the parent's first `num_tokens` tokens and room for one of its own.

        Between steps. Raises NoFreeBlocks and changes nothing.
        """

    def num_own(self, sequence: SequenceBlocks) -> int:
        """Blocks of it that nobody else holds: an estimate where a discipline says so."""

    @property
    def sharings(self) -> int:
        """While it stands still, what a sequence owns changes with the length of its table alone. O(1)."""

    def is_awaited(self, sequence: SequenceBlocks) -> bool:
        """Whether another sequence of this step builds on what this one is about to compute."""

    def release(self, sequence: SequenceBlocks) -> None:
        """Give every block back; what was computed stays cached until it is the least recently used.

        Idempotent. Raises BlocksAwaited, and changes nothing, if `is_awaited`.
        """

    def swap_out(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """`release`, but keep its first `num_tokens` tokens in host memory for its next admission.

        None of them is of the coming step. False, and nothing changed, if there is no room for them.
        """

    def commit_step(self) -> None:
        """The forward succeeded: what was promised since the last commit is computed. O(promised)."""

    def abort_step(self) -> None:
        """The forward failed: nobody will find what was promised. Its sequences must be released."""

    def clear(self) -> None:
        """Forget everything. Raises BlocksInUse and changes nothing while a sequence holds blocks."""

    def stats(self) -> CacheStats:
        """free + used == total, always."""
