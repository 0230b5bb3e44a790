"""The pool and its free queue against lists, under random use with many copies of few hashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_pool import BlockContent, BlockPool, FreeBlockQueue, KVCacheBlock
from cache.errors import NoFreeBlocks
from cache.types import BlockHash

ROOT = BlockHash(b"root")


def content(name: int) -> BlockContent:
    return BlockContent(ROOT, 0, ROOT, bytes([name]), ())


@given(st.lists(st.tuples(st.sampled_from(["append", "popleft", "remove"]), st.integers(0, 6)), max_size=60))
def test_free_queue_is_a_list(acts: list[tuple[str, int]]) -> None:
    blocks = [KVCacheBlock(i) for i in range(7)]
    queue, model = FreeBlockQueue(blocks[:3]), blocks[:3]
    for act, pick in acts:
        if act == "append" and blocks[pick] not in model:
            queue.append(blocks[pick])
            model.append(blocks[pick])
        elif act == "popleft":
            if model:
                assert queue.popleft() is model.pop(0)
            else:
                with pytest.raises(NoFreeBlocks):
                    queue.popleft()
        elif act == "remove" and blocks[pick] in model:
            queue.remove(blocks[pick])
            model.remove(blocks[pick])
        assert list(queue) == model
        assert len(queue) == len(model)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["allocate", "free", "free", "register", "register", "register", "unregister", "touch"]
        ),
        st.integers(0, 7),
        st.integers(0, 2),
    ),
    min_size=20,
    max_size=120,
)


class Heard:
    """A sink that believes what it is told."""

    def __init__(self) -> None:
        self.hashes: list[BlockHash] = []

    def stored(self, block_hash: BlockHash) -> None:
        assert block_hash not in self.hashes
        self.hashes.append(block_hash)

    def removed(self, block_hash: BlockHash) -> None:
        self.hashes.remove(block_hash)


def play(acts: list[tuple[str, int, int]]) -> None:
    heard = Heard()
    pool = BlockPool(8, heard)
    queue, refs, copies = list(range(8)), [0] * 8, dict[BlockHash, list[int]]()

    def forget(block_id: int) -> None:
        for block_hash, ids in list(copies.items()):
            if block_id in ids:
                ids.remove(block_id)
            if not ids:
                del copies[block_hash]

    for verb, pick, name in acts:
        block, block_hash = pool.blocks[pick], BlockHash(bytes([name]))
        is_registered = any(pick in ids for ids in copies.values())
        if verb == "allocate":
            if name > len(queue):
                with pytest.raises(NoFreeBlocks):
                    pool.allocate(name)
                continue
            taken, queue = queue[:name], queue[name:]
            assert [b.block_id for b in pool.allocate(name)] == taken
            for block_id in taken:
                forget(block_id)
                refs[block_id] = 1
        elif verb == "free" and refs[pick]:
            pool.free([block])
            refs[pick] -= 1
            queue += [] if refs[pick] else [pick]
        elif verb == "touch":
            pool.touch(block)
            refs[pick] += 1
            queue = [block_id for block_id in queue if block_id != pick]
        elif verb == "register" and refs[pick] and not is_registered:
            if block_hash in copies:
                assert not pool.register(block, block_hash, content(9)), "one hash, two contents"
            assert pool.register(block, block_hash, content(name))
            copies.setdefault(block_hash, []).append(pick)
        elif verb == "unregister" and is_registered:
            pool.unregister(block)
            forget(pick)
        _compare(pool, heard, queue, refs, copies)


def _compare(
    pool: BlockPool, heard: Heard, queue: list[int], refs: list[int], copies: dict[Any, list[int]]
) -> None:
    assert [block.block_id for block in pool.free_queue] == queue
    assert [block.ref_count for block in pool.blocks] == refs
    assert sorted(heard.hashes) == sorted(copies) == sorted(pool.cached_hashes())
    assert pool.num_cached == sum(map(len, copies.values()))
    for name in range(3):
        block_hash = BlockHash(bytes([name]))
        ids = copies.get(block_hash, [])
        assert [block.block_id for block in pool.copies(block_hash)] == ids, "earliest first"
        served = pool.lookup(block_hash, content(name))
        assert (served.block_id if served else None) == (ids[0] if ids else None), "the earliest serves"
        assert pool.lookup(block_hash, content(9)) is None


@given(ACTS)
@settings(max_examples=200)
def test_pool_is_the_model(acts: list[tuple[str, int, int]]) -> None:
    play(acts)


@pytest.mark.long
@given(ACTS)
@settings(max_examples=1000)
def test_pool_is_the_model_long(acts: list[tuple[str, int, int]]) -> None:
    play(acts)
