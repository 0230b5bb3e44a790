"""Sequences that begin with another's blocks: several answers to one prompt."""

from __future__ import annotations

import pytest

from cache.block_hash import BlockHasher
from cache.errors import NoFreeBlocks
from cache.kv_cache_manager import KVCacheManager, SequenceBlocks
from tests.fakes.cache import a_fingerprint, check_pool
from tests.fakes.kv_cache import a_manager, letters, start


class TestForks:
    """Blocks of four. The parent's prompt is ABCDEFGHIJ: two full blocks and half of a third."""

    def forked(
        self, manager: KVCacheManager, text: str, num_tokens: int
    ) -> tuple[SequenceBlocks, SequenceBlocks]:
        """A parent that has computed `text`, and a child that begins with so many tokens of it."""
        parent, _ = start(manager, text)
        manager.commit_step()
        child = manager.begin(letters(text))
        manager.fork(parent, child, num_tokens)
        return parent, child

    def test_full_blocks_are_shared_and_the_last_one_is_copied(self) -> None:
        manager = a_manager()
        parent, child = self.forked(manager, "ABCDEFGHIJ", 9)
        assert (parent.block_table, child.block_table) == ([0, 1, 2], [0, 1, 3])
        assert child.copy_source == 2
        assert [manager.pool.blocks[i].ref_count for i in range(4)] == [2, 2, 2, 1]
        manager.grow(child, 10)
        manager.commit_step()  # copied: the source is the parent's alone again
        assert child.copy_source is None
        assert [manager.pool.blocks[i].ref_count for i in range(4)] == [2, 2, 1, 1]

    def test_at_a_blocks_end_nothing_is_copied(self) -> None:
        _, child = self.forked(a_manager(), "ABCDEFGHI", 8)
        assert (child.block_table, child.copy_source) == ([0, 1, 3], None)

    def test_without_a_prefix_cache_blocks_are_shared_all_the_same(self) -> None:
        manager = KVCacheManager(10, BlockHasher(a_fingerprint()), block_size=4, prefix_caching=False)
        parent, child = self.forked(manager, "ABCDEFGHIJ", 9)
        assert child.block_table[:2] == parent.block_table[:2]
        manager.release(parent)
        manager.release(child)
        assert manager.num_free == 10

    def test_without_a_block_nothing_changes(self) -> None:
        manager = a_manager(num_blocks=3)
        parent, _ = start(manager, "ABCDEFGHIJ")
        manager.commit_step()
        child = manager.begin(letters("ABCDEFGHIJ"))
        with pytest.raises(NoFreeBlocks):
            manager.fork(parent, child, 9)
        assert (child.block_table, child.copy_source) == ([], None)
        assert [block.ref_count for block in manager.pool.blocks] == [1, 1, 1]

    def test_a_source_that_only_a_fork_still_holds_goes_before_its_parents(self) -> None:
        """Given back after them, it would outlive them in the cache, where nobody could reach it."""
        manager = a_manager()
        parent, _ = start(manager, "ABCDEFGHIJKL")
        manager.commit_step()
        child = manager.begin(letters("ABCDEFGHIJKL"))
        manager.fork(parent, child, 11)
        manager.release(parent)
        manager.release(child)
        check_pool(manager.pool, [])
        queue = [block.block_id for block in manager.pool.free_queue]
        assert queue[-4:] == [2, 3, 1, 0]
