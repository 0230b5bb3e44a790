"""The pool's edges; its laws under random use are in `tests/property/test_block_pool.py`."""

from __future__ import annotations

import pytest

from cache.block_pool import BlockContent, BlockPool, FreeBlockQueue, KVCacheBlock
from cache.errors import ConfigError, NoFreeBlocks
from cache.types import BlockHash

ROOT, OTHER_ROOT = BlockHash(b"r" * 16), BlockHash(b"s" * 16)
NAME = BlockHash(b"h" * 16)
CONTENT = BlockContent(ROOT, 0, ROOT, b"tokens", ())


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[str, BlockHash]] = []

    def stored(self, block_hash: BlockHash) -> None:
        self.said.append(("stored", block_hash))

    def removed(self, block_hash: BlockHash) -> None:
        self.said.append(("removed", block_hash))


def test_first_copy_and_last_removal_are_announced() -> None:
    heard = Heard()
    pool = BlockPool(3, heard)
    one, two = pool.allocate(2)
    assert pool.register(one, NAME, CONTENT)
    assert pool.register(two, NAME, CONTENT)
    assert heard.said == [("stored", NAME)]
    assert pool.lookup(NAME, CONTENT) is one
    pool.unregister(one)
    assert heard.said == [("stored", NAME)]
    assert pool.lookup(NAME, CONTENT) is two
    pool.unregister(two)
    assert heard.said == [("stored", NAME), ("removed", NAME)]
    assert pool.lookup(NAME, CONTENT) is None
    assert (pool.num_cached, pool.removals) == (0, 2)


@pytest.mark.parametrize(
    "other",
    [
        CONTENT._replace(root=OTHER_ROOT),
        CONTENT._replace(position=1),
        CONTENT._replace(parent=NAME),
        CONTENT._replace(tokens=b"Tokens"),
        CONTENT._replace(extra_keys=(b"cat",)),
    ],
)
def test_equal_hash_with_other_content_is_neither_hit_nor_registered(other: BlockContent) -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(2)
    pool.register(one, NAME, CONTENT)
    assert pool.lookup(NAME, other) is None
    assert not pool.register(two, NAME, other)
    assert two.block_hash is None
    assert pool.copies(NAME) == [one]
    assert pool.num_cached == 1


def test_content_is_forgotten_when_the_block_is_taken_not_when_it_is_freed() -> None:
    heard = Heard()
    pool = BlockPool(2, heard)
    [one] = pool.allocate(1)
    pool.register(one, NAME, CONTENT)
    pool.free([one])
    assert pool.lookup(NAME, CONTENT) is one
    pool.allocate(2)
    assert pool.lookup(NAME, CONTENT) is None
    assert heard.said[-1] == ("removed", NAME)


def test_a_touched_block_is_not_evicted() -> None:
    pool = BlockPool(3)
    [one] = pool.allocate(1)
    pool.register(one, NAME, CONTENT)
    pool.free([one])
    pool.touch(one)
    with pytest.raises(NoFreeBlocks, match="needed 3 free blocks, have 2"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert one not in pool.allocate(2)
    pool.touch(one)
    pool.free([one])
    assert one.ref_count == 1
    assert pool.num_free == 0


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([pool.blocks[0]])
    with pytest.raises(AssertionError, match="nobody uses it"):
        pool.register(pool.blocks[0], NAME, CONTENT)
    with pytest.raises(AssertionError, match="not registered"):
        pool.unregister(pool.blocks[0])
    [block] = pool.allocate(1)
    pool.register(block, NAME, CONTENT)
    with pytest.raises(AssertionError, match="registered already"):
        pool.register(block, NAME, CONTENT)
    queue = FreeBlockQueue([free := KVCacheBlock(7)])
    with pytest.raises(AssertionError, match="in the free queue already"):
        queue.append(free)
    queue.remove(free)
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(free)


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ConfigError, match="num_blocks = 0"):
        BlockPool(0)


def test_a_block_tells_what_it_is() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    assert repr(block) == "KVCacheBlock(0, ref_count=1, block_hash=-)"
    pool.register(block, NAME, CONTENT)
    assert NAME.hex() in repr(block)
