"""A fixed pool of blocks: references, the free queue, and which block holds which content.

Knows block ids, hashes and the content behind them; knows neither sequences nor tensors.
Not thread-safe: engine thread only.

Eviction is lazy: a freed block keeps its content and waits in the free queue; whoever allocates
takes the head of the queue, and only then is the content forgotten. Least recently used first.

Why a cached hash's parent is always cached too ("leaves leave first"). The invariant is:
every registered block has a *witness*, a registered copy of its parent, that is in use while the
block is in use, and in use or behind it in the free queue while the block is idle.
  - A sequence holds registered blocks as a leading run of its table, so within it each block's
    witness is the block before. It gives them back last first: witnesses go behind.
  - Eviction takes the head, which is behind nobody, hence nobody's witness but that of blocks
    with another one.
  - Taking an idle block out of the queue keeps it a witness: in use counts.
What would break it, and why it cannot here:
  - A duplicate left without a hash: sequence A computes its own copy of a cached parent, registers
    a child, the parent's first copy is evicted, and the child stands alone. So *every* full block is
    registered, duplicates too, and a hash goes only with its last copy.
  - A duplicate discarded early (`merging.py`): its user takes the earliest copy in its place, at the same
    moment, so whatever it was a witness to has that one, in use as well.
  - A child whose parent could not be registered (a hash collision, an aborted step): `KVCacheManager`
    registers a block only behind a registered one.
  - An aborted step: blocks registered since the last commit go together, children before parents.
    A committed block has a committed witness, since lookups serve the earliest copy of each hash.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, Protocol

from cache.errors import ConfigError, NoFreeBlocks
from cache.types import BlockHash


class BlockEventSink(Protocol):
    """Told when the first copy of a hash is cached and when the last one goes. Must not block."""

    def stored(self, block_hash: BlockHash) -> None: ...
    def removed(self, block_hash: BlockHash) -> None: ...


class Overflow(Protocol):
    """Where a pool puts what it evicts (`host_tier.py`)."""

    def spill(self, block_id: int, block_hash: BlockHash, content: BlockContent, *, is_last: bool) -> None:
        """The last computed copy of this content is about to be forgotten. is_last: nobody is about to
        compute another."""

    def agrees(self, block_hash: BlockHash, content: BlockContent) -> bool:
        """Whether the hash names no other content there."""


class BlockContent(NamedTuple):
    """What a block's keys and values were computed from; a hit is exact only if all of it is equal.

    `position` is part of it: without it, a forged block hash equal to a root would let block 1 of one
    prompt pass for block 0 of another.
    """

    root: BlockHash
    position: int  # of the block in its sequence, from 0
    parent: BlockHash  # the root for position 0
    tokens: bytes  # little-endian int32, shape (block_size,)
    extra_keys: tuple[bytes, ...]


class KVCacheBlock:
    """One block of KV memory. Written by `BlockPool` and `FreeBlockQueue` alone."""

    __slots__ = (
        "block_hash",
        "block_id",
        "content",
        "next_copy",
        "next_free",
        "prev_copy",
        "prev_free",
        "ref_count",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None  # None = not registered; set and cleared with `content`
        self.content: BlockContent | None = None
        self.prev_free: KVCacheBlock | None = None  # both None while in use
        self.next_free: KVCacheBlock | None = None
        self.prev_copy: KVCacheBlock = self  # ring of the copies of one hash, earliest first
        self.next_copy: KVCacheBlock = self

    def __repr__(self) -> str:
        name = self.block_hash.hex() if self.block_hash else "-"
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, block_hash={name})"


class FreeBlockQueue:
    """Blocks nobody uses, next to be taken first. Intrusive: O(1) at both ends and in the middle."""

    __slots__ = ("_end", "_size")

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        # One sentinel closes the ring, so that no operation has a special case at an end.
        self._end = KVCacheBlock(-1)
        self._end.prev_free = self._end.next_free = self._end
        self._size = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._end.next_free
        while block is not None and block is not self._end:
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        last = self._end.prev_free
        assert last is not None
        assert block.next_free is None, "block is in the free queue already"
        last.next_free = self._end.prev_free = block
        block.prev_free, block.next_free = last, self._end
        self._size += 1

    def prepend(self, block: KVCacheBlock) -> None:
        first = self._end.next_free
        assert first is not None
        assert block.next_free is None, "block is in the free queue already"
        first.prev_free = self._end.next_free = block
        block.prev_free, block.next_free = self._end, first
        self._size += 1

    def popleft(self) -> KVCacheBlock:
        """Raises NoFreeBlocks when empty."""
        first = self._end.next_free
        if first is None or first is self._end:
            raise NoFreeBlocks(needed=1, free=0)
        self.remove(first)
        return first

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None, "block is not in the free queue"
        assert after is not None
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._size -= 1


class BlockPool:
    """Owns every block. A hash maps to one or more physical copies; the earliest serves hits."""

    def __init__(
        self,
        num_blocks: int,
        sink: BlockEventSink | None = None,
        overflow: Overflow | None = None,
        promises: Container[KVCacheBlock] = (),
    ) -> None:
        """overflow: where evicted content goes; None forgets it. promises: registered, not yet computed."""
        if num_blocks < 1:
            raise ConfigError("num_blocks", num_blocks, "at least 1")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]  # by block id
        self.free_queue = FreeBlockQueue(self.blocks)
        self.num_cached = 0  # registered blocks, duplicates included
        self.removals = 0  # counts unregistrations: a lookup's answer holds while it stands still
        self.sharings = 0  # counts users that came to a block beside others, or left it to them
        self._earliest: dict[BlockHash, KVCacheBlock] = {}  # heads of the copy rings
        self._sink = sink
        self._overflow = overflow
        self._promises = promises

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks in the free queue, cached content included."""
        return len(self.free_queue)

    @property
    def num_duplicates(self) -> int:
        """Registered blocks whose content an earlier one holds as well."""
        return self.num_cached - len(self._earliest)

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """`count` blocks without content, one reference each, least recently used first.

        Forgets what they held. Raises NoFreeBlocks and changes nothing when there are too few.
        """
        if count > len(self.free_queue):
            raise NoFreeBlocks(needed=count, free=len(self.free_queue))
        blocks = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                self._evict(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, block: KVCacheBlock) -> None:
        """One more reference; an idle block leaves the free queue. O(1)."""
        if block.ref_count == 0:
            self.free_queue.remove(block)
        else:
            self.sharings += 1
        block.ref_count += 1

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One reference less each, in the order given; what nobody uses then waits in the free queue.

        Give a sequence's blocks last first: the law of leaving leaves stands on it.
        """
        for block in blocks:
            assert block.ref_count > 0, f"block {block.block_id} freed more often than taken"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_queue.append(block)
            else:
                self.sharings += 1

    def discard(self, block: KVCacheBlock) -> None:
        """The block's one user gives back a copy that nobody needs: out of the cache, and next to be taken.

        Taking it costs nobody a hit, so it goes before everything that is cached. O(1).
        """
        assert block.ref_count == 1, f"block {block.block_id} has other users"
        self.unregister(block)
        block.ref_count = 0
        self.free_queue.prepend(block)

    def lookup(self, block_hash: BlockHash, content: BlockContent) -> KVCacheBlock | None:
        """The earliest copy of exactly this content. O(1); changes nothing."""
        block = self._earliest.get(block_hash)
        # The comparison makes a hit exact whatever the hash: a collision is a miss.
        return block if block is not None and block.content == content else None

    def register(self, block: KVCacheBlock, block_hash: BlockHash, content: BlockContent) -> bool:
        """Let lookups find `block`. False, and nothing changed, if the hash names other content here.

        All copies of a hash hold equal content, as long as one is cached: with the law of parents,
        equality of one block's content then proves equality of the whole prefix.
        """
        assert block.block_hash is None, f"block {block.block_id} is registered already"
        assert block.ref_count > 0, f"block {block.block_id} registered while nobody uses it"
        first = self._earliest.get(block_hash)
        if first is None:
            if self._overflow is not None and not self._overflow.agrees(block_hash, content):
                return False
            self._earliest[block_hash] = block
            if self._sink is not None:
                self._sink.stored(block_hash)
        elif first.content == content:
            last = first.prev_copy
            last.next_copy = first.prev_copy = block
            block.prev_copy, block.next_copy = last, first
        else:
            return False
        block.block_hash, block.content = block_hash, content
        self.num_cached += 1
        return True

    def _evict(self, block: KVCacheBlock) -> None:
        if self._overflow is not None and self._is_last_computed(block):
            assert block.block_hash is not None
            assert block.content is not None
            is_last = block.next_copy is block
            self._overflow.spill(block.block_id, block.block_hash, block.content, is_last=is_last)
        self.unregister(block)

    def _is_last_computed(self, block: KVCacheBlock) -> bool:
        """Whether all other copies are promises yet: if these are not kept, the content is nowhere."""
        copy = block.next_copy
        while copy is not block:
            if copy not in self._promises:
                return False
            copy = copy.next_copy
        return True

    def unregister(self, block: KVCacheBlock) -> None:
        """Take the block's content out of the cache; the hash goes with its last copy. O(1)."""
        block_hash = block.block_hash
        assert block_hash is not None, f"block {block.block_id} is not registered"
        if block.next_copy is block:
            del self._earliest[block_hash]
            if self._sink is not None:
                self._sink.removed(block_hash)
        else:
            if self._earliest[block_hash] is block:
                self._earliest[block_hash] = block.next_copy
            block.prev_copy.next_copy, block.next_copy.prev_copy = block.next_copy, block.prev_copy
            block.prev_copy = block.next_copy = block
        block.block_hash = block.content = None
        self.num_cached -= 1
        self.removals += 1

    def cached_hashes(self) -> list[BlockHash]:
        """Every hash with at least one copy. O(cached); for tests and debugging."""
        return list(self._earliest)

    def copies(self, block_hash: BlockHash) -> list[KVCacheBlock]:
        """The hash's physical copies, earliest first; empty when it is not cached."""
        first = self._earliest.get(block_hash)
        if first is None:
            return []
        copies = [first]
        while (following := copies[-1].next_copy) is not first:
            copies.append(following)
        return copies
