"""Stand-ins for the cache's tests: forged hashers, and an obviously correct cache to compare with."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from cache.block_hash import BlockHasher, ExtraKeys
from cache.block_pool import BlockPool
from cache.errors import BlocksAwaited, NoFreeBlocks
from cache.events import Digest, EventBatch, Snapshot, digest_of
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.kv_cache_manager import KVCacheManager, SequenceBlocks
from cache.types import BlockHash, HashHint, PinId


def a_fingerprint(**changes: Any) -> Fingerprint:
    fields: dict[str, Any] = {
        "model_id": "tiny",
        "revision": "r1",
        "kv_dtype": "float32",
        "template_digest": "",
        "block_size": 4,
        "hash_algorithm": HashAlgorithm.SHA256,
    }
    return Fingerprint(**{**fields, **changes})


class ForgingHasher(BlockHasher):
    """A hasher that says something else of each block than it should. What the cache then must not do is
    believe it."""

    __slots__ = ()

    def forged(self, honest: BlockHash, token_ids: array[int]) -> BlockHash:
        """What to say of a block of these tokens; later blocks hang on that."""
        raise NotImplementedError

    def extend(
        self,
        parent: BlockHash,
        token_ids: array[int],
        first_block: int,
        last_block: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        hashes = []
        for index in range(first_block, last_block):
            [honest] = super().extend(parent, token_ids, index, index + 1, extra_keys)
            parent = self.forged(honest, token_ids[index * self.block_size : (index + 1) * self.block_size])
            hashes.append(parent)
        return hashes


class ForgedHasher(ForgingHasher):
    """Keeps of each block hash only the bits set in `mask` (16 bytes): with few, nearly all collide."""

    __slots__ = ("_mask",)

    def __init__(self, fingerprint: Fingerprint, mask: bytes) -> None:
        super().__init__(fingerprint)
        self._mask = mask

    def forged(self, honest: BlockHash, token_ids: array[int]) -> BlockHash:
        return BlockHash(bytes(a & b for a, b in zip(honest, self._mask, strict=True)))


class NaiveCache:
    """What `KVCacheManager` should do, written with lists and whole prefixes: no hashes, no links, slow."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.queue = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.prefix_of: dict[int, Any] = {}  # block id -> whole prefix, in order of registration
        self.tables: dict[SequenceBlocks, list[int]] = {}
        self.pins: dict[PinId, list[int]] = {}
        self.promised: dict[int, SequenceBlocks] = {}  # registered in this step
        self.sources: dict[SequenceBlocks, int] = {}  # of forks in this step

    def match(self, sequence: SequenceBlocks) -> list[int]:
        return self._run(sequence, (len(sequence.token_ids) - 1) // self.block_size)

    def _run(self, sequence: SequenceBlocks, limit: int) -> list[int]:
        hit: list[int] = []
        for index in range(limit):
            wanted = self._prefix(sequence, index)
            copies = [block_id for block_id, prefix in self.prefix_of.items() if prefix == wanted]
            if not copies:
                break
            hit.append(copies[0])
        return hit

    def schedule(self, sequence: SequenceBlocks, hit: list[int], num_tokens: int) -> None:
        """`admit` with its hit, or `grow` with an empty one; `num_tokens` in all."""
        self._take(sequence, hit, num_tokens)
        for index in range(num_tokens // self.block_size):
            block_id = self.tables[sequence][index]
            if block_id not in self.prefix_of:
                self.prefix_of[block_id] = self._prefix(sequence, index)
                self.promised[block_id] = sequence

    def reserve(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        self._take(sequence, [], num_tokens)

    def _take(self, sequence: SequenceBlocks, hit: list[int], num_tokens: int) -> None:
        table = self.tables.get(sequence, [])
        num_new = -(-num_tokens // self.block_size) - len(table) - len(hit)
        idle = [block_id for block_id in hit if block_id in self.queue]
        if num_new + len(idle) > len(self.queue):
            raise NoFreeBlocks(needed=num_new + len(idle), free=len(self.queue))
        self.queue = [block_id for block_id in self.queue if block_id not in idle]
        new = [self.queue.pop(0) for _ in range(num_new)]
        for block_id in new:
            self.prefix_of.pop(block_id, None)
        for block_id in hit + new:
            self.refs[block_id] += 1
        self.tables[sequence] = [*table, *hit, *new]

    def release(self, sequence: SequenceBlocks) -> None:
        own = [block_id for block_id, owner in self.promised.items() if owner is sequence]
        if any(self.refs[block_id] > 1 for block_id in own):
            raise BlocksAwaited
        for block_id in own:
            del self.promised[block_id], self.prefix_of[block_id]
        if sequence in self.sources:
            self._free([self.sources.pop(sequence)])
        self._free(self.tables.pop(sequence, []))

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> None:
        if not self.queue:
            raise NoFreeBlocks(needed=1, free=0)
        num_shared, num_copied = divmod(num_tokens, self.block_size)
        own, table = self.queue.pop(0), self.tables[parent]
        self.prefix_of.pop(own, None)
        self.tables[child] = [*table[:num_shared], own]
        for block_id in self.tables[child]:
            self.refs[block_id] += 1
        if num_copied:
            self.sources[child] = table[num_shared]
            self.refs[table[num_shared]] += 1

    def pin(self, pin_id: PinId, sequence: SequenceBlocks, num_blocks: int) -> bool:
        run = self._run(sequence, num_blocks)
        if len(run) < num_blocks:
            return False
        self.queue = [block_id for block_id in self.queue if block_id not in run]
        for block_id in run:
            self.refs[block_id] += 1
        self.pins[pin_id] = run
        return True

    def unpin(self, pin_id: PinId) -> None:
        self._free(self.pins.pop(pin_id, []))

    def _free(self, table: list[int]) -> None:
        for block_id in reversed(table):
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                self.queue.append(block_id)

    def commit_step(self) -> None:
        self.promised.clear()
        for source in self.sources.values():
            self._free([source])
        self.sources.clear()

    def abort_step(self) -> None:
        for block_id in self.promised:
            del self.prefix_of[block_id]
        self.promised.clear()

    def _prefix(self, sequence: SequenceBlocks, index: int) -> tuple[Any, ...]:
        """Everything that decides block `index`'s keys and values."""
        keys = [sequence.extra_keys.get(i, ()) for i in range(index + 1)]
        return sequence.root, list(sequence.token_ids[: (index + 1) * self.block_size]), keys


class Subscriber:
    """The router's side of KV events: applies snapshots and batches, and trusts neither."""

    def __init__(self) -> None:
        self.hashes: set[HashHint] = set()
        self.seq = 0

    def apply(self, batch: EventBatch) -> None:
        assert batch.seq == self.seq + 1
        assert self.hashes.issuperset(batch.removed), "removed what was not there"
        self.hashes.difference_update(batch.removed)
        assert self.hashes.isdisjoint(batch.stored), "stored what was there already"
        self.hashes.update(batch.stored)
        self.seq = batch.seq
        assert self.digest == batch.digest

    def load(self, snapshot: Snapshot) -> None:
        self.hashes = set(snapshot.hashes)
        assert len(self.hashes) == len(snapshot.hashes)
        self.seq = snapshot.seq

    @property
    def digest(self) -> Digest:
        return digest_of(self.hashes)


def check_pool(pool: BlockPool, tables: Iterable[list[int]]) -> None:
    """Every law that holds of a pool at any moment. `tables`: of all sequences and pins that hold blocks."""
    held = [block_id for table in tables for block_id in table]
    for block in pool.blocks:
        assert block.ref_count == held.count(block.block_id), block
        assert (block.block_hash is None) == (block.content is None)
    queue = [block.block_id for block in pool.free_queue]
    assert len(queue) == pool.num_free
    assert sorted(queue) == sorted(set(range(pool.num_blocks)) - set(held)), "free + used != total"
    _check_copies(pool)
    _check_parents(pool, queue)


def check_sequence(manager: KVCacheManager, sequence: SequenceBlocks) -> None:
    """The registered blocks of a table are its leading ones, under the sequence's own hashes."""
    blocks = [manager.pool.blocks[block_id] for block_id in sequence.block_table]
    registered = [block.block_hash is not None for block in blocks]
    assert registered == sorted(registered, reverse=True)
    for block, block_hash in zip(blocks[: sum(registered)], sequence.block_hashes, strict=False):
        assert block.block_hash == block_hash


def _check_copies(pool: BlockPool) -> None:
    found = 0
    for block_hash in pool.cached_hashes():
        copies = pool.copies(block_hash)
        found += len(copies)
        assert all(copy.block_hash == block_hash for copy in copies)
        assert len({copy.content for copy in copies}) == 1, "one hash, two contents"
    assert found == pool.num_cached == sum(block.block_hash is not None for block in pool.blocks)


def _check_parents(pool: BlockPool, queue: list[int]) -> None:
    place = {block_id: number for number, block_id in enumerate(queue)}
    in_use = len(queue)  # later than any place
    for block in pool.blocks:
        if block.content is None or block.content.position == 0:
            continue
        parents = pool.copies(block.content.parent)
        assert parents, "a cached hash without its parent"
        last_to_go = max(place.get(parent.block_id, in_use) for parent in parents)
        assert last_to_go >= place.get(block.block_id, in_use), "its last parent will be evicted before it"
