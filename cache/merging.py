"""A KV cache manager that keeps one block per content: a full block gives way to its twin.

    [0][1][2]        first to fill "EFGH" with block 1
    [0][3 ..] ->     [0][1], and block 3 is the next to be taken

When: at the commit of the step that filled it, neither earlier nor later.
  - Not when it is scheduled. The step would then write into a block that others read, and a failed step would
    have spoilt it.
  - Not later, so that between steps a hash has one copy: the law of parents holds by itself, and those blocks
    of a table that others share lead it.

What it means for whoever computes: a block id once read from a table is good for one step. Both blocks were
computed from the same tokens, maybe in batches of other shapes, so their keys and values are equal up to
rounding, as those of any prefix hit are: output changes as little, and as much, as by a hit.
Knows what `KVCacheManager` knows.
"""

from __future__ import annotations

from cache.block_pool import KVCacheBlock
from cache.kv_cache_manager import KVCacheManager, SequenceBlocks


class MergingKVCacheManager(KVCacheManager):
    """`KVCacheManager` without duplicates between steps. A block table's entries may change at a commit."""

    def commit_step(self) -> None:
        """The step's forward succeeded: what it filled that was cached already is returned. O(filled)."""
        filled = list(self._uncommitted.items())
        super().commit_step()
        for block, sequence in filled:
            self._merge(block, sequence)

    def _merge(self, block: KVCacheBlock, sequence: SequenceBlocks) -> None:
        """Put the earliest copy in the block's place."""
        assert block.content is not None
        assert block.block_hash is not None
        twin = self.pool.lookup(block.block_hash, block.content)
        assert twin is not None
        if twin is block:
            return
        # Lookups serve the earliest copy, so nobody else has been given this one.
        assert block.ref_count == 1, f"block {block.block_id} is a copy that others share"
        self.pool.touch(twin)
        sequence.block_table[block.content.position] = twin.block_id
        self.pool.discard(block)
