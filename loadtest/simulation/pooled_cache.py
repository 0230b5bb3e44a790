"""One cache that several engines share, each with its own limit on what its running sequences hold.

What any engine has cached, all of them find; content takes the room of all of them together. But a running
sequence's blocks lie in its engine's own memory: without that limit one engine's queue would starve the
others, and the ideal would fall behind what separate engines do.
Knows blocks and limits; knows neither engines nor time.
"""

from __future__ import annotations

from collections import Counter

from cache.block_hash import BlockHasher
from cache.block_pool import BlockPool
from cache.errors import NoFreeBlocks
from cache.kv_cache_manager import KVCacheManager, PrefixHit, SequenceBlocks


class PooledCache(KVCacheManager):
    """One engine's door to the pool that it shares."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher, *, block_size: int, own_blocks: int) -> None:
        """own_blocks: in use by this engine's sequences at most; of all engines together at most the pool's.

        With that nobody ever finds the pool itself exhausted.
        """
        super().__init__(1, hasher, block_size=block_size)
        self.pool = pool
        self._own_blocks = own_blocks
        self._in_use: Counter[int] = Counter()  # block id -> this engine's sequences that hold it

    @property
    def num_free(self) -> int:
        """Blocks that this engine's sequences may still take."""
        return self._own_blocks - len(self._in_use)

    def blocks_needed(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> int:
        """What `admit` would take of `num_free`: hit blocks too, unless a sequence here holds them."""
        new_to_us = sum(1 for block_id in hit.block_ids if block_id not in self._in_use)
        return self.new_blocks(num_tokens) + new_to_us

    def admit(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        needed = self.blocks_needed(sequence, hit, num_tokens)
        if needed > self.num_free:
            raise NoFreeBlocks(needed=needed, free=self.num_free)
        super().admit(sequence, hit, num_tokens)
        self._in_use.update(sequence.block_table)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        before = len(sequence.block_table)
        needed = self.new_blocks(num_tokens) - before
        if needed > self.num_free:
            raise NoFreeBlocks(needed=needed, free=self.num_free)
        super().grow(sequence, num_tokens)
        if needed > 0:
            self._in_use.update(sequence.block_table[before:])

    def release(self, sequence: SequenceBlocks) -> None:
        held = list(sequence.block_table)
        super().release(sequence)
        for block_id in held:
            self._in_use[block_id] -= 1
            if not self._in_use[block_id]:
                del self._in_use[block_id]
