"""The cache's laws under random steps: admit, grow, preempt, commit, abort, evict, pin, unpin, clear.

Beside the manager run: the KV memory that a model would have written (a hit is wrong exactly when
it shows another prompt's tokens), an obviously correct cache (`NaiveCache`), and a subscriber.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, seed, settings

from cache import event_log
from cache.block_hash import BlockHasher, hint, hints
from cache.errors import BlocksAwaited, PinsFull
from cache.event_log import EventLog
from cache.events import Load
from cache.kv_cache_manager import KVCacheManager, PrefixHit, SequenceBlocks
from cache.types import PinId, pack_tokens
from tests.fakes.cache import ForgedHasher, NaiveCache, Subscriber, a_fingerprint, check_pool, check_sequence
from tests.fakes.cache_acts import Act, CacheActs, Tracked, acts, picked, seen

BLOCK_SIZE = 2
# What of a block hash survives: all; nothing; two bits; everything but what the router sees.
MASKS = {
    "honest": b"\xff" * 16,
    "constant hash": bytes(16),
    "four hashes": b"\x03" + bytes(15),
    "one hint": bytes(8) + b"\xff" * 8,
}


class Driver(CacheActs):
    """Against the manager, with what it alone has: pins, events, forged hashes, a naive cache beside."""

    def __init__(self, mask: bytes, num_blocks: int) -> None:
        mark = a_fingerprint(block_size=BLOCK_SIZE)
        self.is_honest = mask == MASKS["honest"]
        self.hasher = BlockHasher(mark) if self.is_honest else ForgedHasher(mark, mask)
        self.log = EventLog(epoch=1)
        self.max_pinned = num_blocks // 2
        self.manager = KVCacheManager(
            num_blocks, self.hasher, block_size=BLOCK_SIZE, sink=self.log, max_pinned=self.max_pinned
        )
        super().__init__(self.manager, most_children=3)
        self.naive = NaiveCache(num_blocks, BLOCK_SIZE)
        self.subscriber = Subscriber()
        self.pinned: dict[PinId, dict[int, list[Any]]] = {}  # block id -> what its slots held when pinned
        self.promised: dict[PinId, int] = {}
        self.num_pins = 0
        self.parent_of: dict[int, int | None] = {}  # hint -> parent's

    # -- beside what the scheduler does -----------------------------------------------------------

    def _begun(self, token_ids: array[int], salt: str, pick: int) -> SequenceBlocks:
        extra_keys = {1: (b"image",)} if pick == 6 else {}
        root = self.hasher.root(salt=salt)
        sent = self.hasher.chain(root, token_ids, extra_keys) if pick % 2 else []
        blocks = self.manager.begin(token_ids, salt=salt, extra_keys=extra_keys, block_hashes=sent)
        assert blocks.block_hashes == sent
        return blocks

    def _twin(self, parent: Tracked, num_tokens: int) -> SequenceBlocks:
        token_ids, extra_keys = parent.blocks.token_ids[:num_tokens], parent.blocks.extra_keys
        return self.manager.begin(token_ids, salt=parent.salt, extra_keys=extra_keys)

    def _computed_from(self, sequence: Tracked, position: int) -> tuple[Any, ...]:
        blocks = sequence.blocks
        keys = [blocks.extra_keys.get(index, ()) for index in range(position // BLOCK_SIZE + 1)]
        return blocks.root, list(blocks.token_ids[: position + 1]), keys

    def _is_held(self) -> bool:
        return bool(self.pinned) or super()._is_held()

    def _did_admit(self, hit: PrefixHit, *, needed: int, free: int) -> None:
        assert free - self.manager.num_free == needed <= free

    def _did_schedule(self, sequence: Tracked, hit_ids: Sequence[int], first: int, num_tokens: int) -> None:
        if self.is_honest:
            self.naive.schedule(sequence.blocks, list(hit_ids), num_tokens)
        self.count["refused"] += sequence.blocks.num_offered > sum(
            self.manager.pool.blocks[block_id].block_hash is not None
            for block_id in sequence.blocks.block_table
        )
        chain = hints(sequence.blocks.block_hashes)
        self.parent_of.update(zip(chain, [None, *chain], strict=False))

    def _did_reserve(self, sequence: Tracked, num_tokens: int) -> None:
        if self.is_honest:
            self.naive.reserve(sequence.blocks, num_tokens)

    def _did_fork(self, parent: Tracked, child: SequenceBlocks, num_tokens: int) -> None:
        if self.is_honest:
            self.naive.fork(parent.blocks, child, num_tokens)

    def _was_awaited(self, sequence: Tracked) -> None:
        if self.is_honest:
            with pytest.raises(BlocksAwaited):
                self.naive.release(sequence.blocks)

    def _did_release(self, sequence: Tracked) -> None:
        self.naive.release(sequence.blocks)

    def _did_commit(self) -> None:
        self.naive.commit_step()

    def _did_abort(self) -> None:
        self.naive.abort_step()
        check_pool(self.manager.pool, self._tables())

    def _did_clear(self) -> None:
        self.naive.prefix_of.clear()

    def _match(self, sequence: Tracked) -> PrefixHit:
        hit = super()._match(sequence)
        if self.is_honest:
            assert list(hit.block_ids) == self.naive.match(sequence.blocks)
        return hit

    # -- pins -------------------------------------------------------------------------------------

    def pin(self, pick: int, amount: int, is_so: bool) -> None:
        """Hold a prefix that is cached, under the name it was promised for or a new one."""
        if self.step or (sequence := picked(self.sequences, pick)) is None:
            return
        num_blocks = 1 + amount % max(1, len(sequence.blocks.token_ids) // BLOCK_SIZE)
        if num_blocks * BLOCK_SIZE > len(sequence.blocks.token_ids):
            return
        pin_id = next(iter(self.promised), None) if is_so else None
        pin_id = pin_id or self._new_pin()
        before, pins = self.state(), self.manager.pins
        try:
            is_held = self.manager.pin(pin_id, sequence.blocks, num_blocks)
        except PinsFull as error:
            assert self.state() == before
            others = sum(promised for other, promised in self.promised.items() if other != pin_id)
            self._check_unfit(error, self.max_pinned - pins.num_blocks - others)
            self.count["unfit"] += 1
            return
        if self.is_honest:
            assert is_held == self.naive.pin(pin_id, sequence.blocks, num_blocks)
        if is_held:
            self.promised.pop(pin_id, None)
            self.pinned[pin_id] = {
                block.block_id: [self.slots[block.block_id * BLOCK_SIZE + at] for at in range(BLOCK_SIZE)]
                for block in pins.blocks(pin_id)
            }
            self.count["pins"] += 1
        else:
            assert self.state() == before

    def promise(self, pick: int, amount: int, is_so: bool) -> None:
        """Room for a prefix that is to be computed."""
        if (sequence := picked(self.sequences, pick)) is None:
            return
        num_blocks, pin_id, before = (
            len(sequence.blocks.token_ids) // BLOCK_SIZE,
            self._new_pin(),
            self.state(),
        )
        left = self.manager.pins.left
        try:
            self.manager.promise_pin(pin_id, sequence.blocks, num_blocks)
        except PinsFull as error:
            assert self.state() == before
            self._check_unfit(error, left)
            return
        self.promised[pin_id] = left - self.manager.pins.left

    def unpin(self, pick: int, amount: int, is_so: bool) -> None:
        """Expired, deleted, or its computation came to nothing; inside a step or between two."""
        if (pin_id := picked([*self.pinned, *self.promised], pick)) is None:
            return
        assert self.manager.unpin(pin_id)
        assert not self.manager.unpin(pin_id)
        self.naive.unpin(pin_id)
        self.pinned.pop(pin_id, None)
        self.promised.pop(pin_id, None)

    # -- what the router sees -------------------------------------------------------------------

    def flush(self, pick: int, amount: int, is_so: bool) -> None:
        """A batch reaches the subscriber; or a late one starts from a snapshot, changes pending."""
        if is_so:
            self._join()
        with mock.patch.object(
            event_log, "MAX_CHANGES_PER_BATCH", 1 + amount
        ):  # cut: still closed under parents
            self._flush_once()
            while self.log.has_changes:
                self._flush_once()
        assert self.subscriber.hashes == set(hints(self.manager.pool.cached_hashes()))

    def _flush_once(self) -> None:
        self.subscriber.apply(self.log.flush(Load()))
        if self.is_honest:
            parents = {self.parent_of[name] for name in self.subscriber.hashes} - {None}
            assert parents <= self.subscriber.hashes, "the router's jump needs every parent"

    def _join(self) -> None:
        snapshot = self.log.snapshot(Load())
        late = Subscriber()
        late.load(snapshot)
        assert (late.hashes, late.seq) == (self.subscriber.hashes, self.subscriber.seq)
        self.subscriber = late
        if self.is_honest:
            seen = set()
            for name in snapshot.hashes:
                assert self.parent_of[name] is None or self.parent_of[name] in seen, (
                    "a child before its parent"
                )
                seen.add(name)

    # -- laws -----------------------------------------------------------------------------------

    def check_laws(self) -> None:
        pool = self.manager.pool
        check_pool(pool, self._tables())
        for sequence in self.sequences:
            check_sequence(self.manager, sequence.blocks)
        stats = self.manager.stats()
        assert stats.free + stats.used == stats.total == pool.num_blocks
        self.check_pins()
        if self.is_honest:
            self.check_against_naive()

    def check_pins(self) -> None:
        """They keep their bound; what they hold is in nobody's way but theirs, and stays as it was."""
        pins, blocks = self.manager.pins, self.manager.pool.blocks
        held = {block_id for content in self.pinned.values() for block_id in content}
        assert self.manager.stats().pinned == pins.num_blocks == len(held)
        assert len(held) + sum(self.promised.values()) == self.max_pinned - pins.left <= self.max_pinned
        assert len(pins) == len(self.pinned) + len(self.promised)
        for content in self.pinned.values():
            for block_id, slots in content.items():
                assert blocks[block_id].block_hash is not None, "a pinned block was evicted"
                assert [self.slots[block_id * BLOCK_SIZE + at] for at in range(BLOCK_SIZE)] == slots, (
                    "and written over"
                )

    def check_against_naive(self) -> None:
        pool = self.manager.pool
        assert [block.block_id for block in pool.free_queue] == self.naive.queue
        assert [block.ref_count for block in pool.blocks] == self.naive.refs
        registered = {block.block_id for block in pool.blocks if block.block_hash is not None}
        assert registered == set(self.naive.prefix_of)
        by_hash = [pool.blocks[block_id].block_hash for block_id in sorted(registered)]
        by_prefix = [self.naive.prefix_of[block_id] for block_id in sorted(registered)]
        for i in range(len(by_hash)):
            for j in range(i):
                assert (by_hash[i] == by_hash[j]) == (by_prefix[i] == by_prefix[j]), (
                    "same prefix <=> same hash"
                )
        for sequence in self.sequences:
            assert sequence.blocks.block_table == self.naive.tables.get(sequence.blocks, [])

    # -- shared by the acts --------------------------------------------------------------------------------

    def _tables(self) -> list[list[int]]:
        return [
            *(sequence.blocks.block_table for sequence in self.sequences),
            *([s.blocks.copy_source] for s in self.sequences if s.blocks.copy_source is not None),
            *map(list, self.pinned.values()),
        ]

    def _check_unfit(self, error: PinsFull, left: int) -> None:
        assert error.needed > error.left == left

    def _new_pin(self) -> PinId:
        self.num_pins += 1
        return PinId(f"pin-{self.num_pins}")

    def state(self) -> tuple[Any, ...]:
        pool = self.manager.pool
        return (
            [block.block_id for block in pool.free_queue],
            [(block.ref_count, block.block_hash) for block in pool.blocks],
            [list(sequence.blocks.block_table) for sequence in self.sequences],
            self.manager.stats(),
            self.manager.pins.left,
        )


# How often each verb comes: as in a busy engine, with more preemption and failure than any should see.
VERBS = [
    *["begin"] * 5, *["admit"] * 6, *["grow"] * 8, *["commit"] * 5, *["release"] * 4, *["flush"] * 2,
    *["pin"] * 3, *["unpin"] * 2, *["fork"] * 2, "reserve", "promise", "look", "abort", "clear",
]  # fmt: skip


def _run(mask: str, num_blocks: int, max_examples: int, again: int = 0) -> Counter[str]:
    """What happened how often, so that a test can tell that it has seen what it is about.

    again: other examples for each number.
    """
    count: Counter[str] = Counter()

    @settings(max_examples=max_examples)
    @given(acts=acts(VERBS))
    def play(acts: list[Act]) -> None:
        driver = Driver(MASKS[mask], num_blocks)
        for act in acts:
            driver.play(*act)
        count.update(driver.count)
        count["duplicates"] += driver.manager.pool.num_cached - len(driver.manager.pool.cached_hashes())
        count["removals"] += driver.manager.pool.removals

    (seed(again)(play) if again else play)()
    return count


@pytest.mark.parametrize("num_blocks", [6, 14])
@pytest.mark.parametrize("mask", MASKS)
def test_laws(mask: str, num_blocks: int) -> None:
    """Pools small enough to evict all the time, and large enough to hold duplicates."""
    wanted = ["hit tokens", "removals", "pins", "forks"]
    if mask in ("constant hash", "four hashes"):
        wanted.append("refused")
    count = seen(wanted, lambda again: _run(mask, num_blocks, max_examples=40, again=again))
    assert "refused" in wanted or not count["refused"]


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_blocks", [3, 24])
@pytest.mark.parametrize("mask", MASKS)
def test_laws_long(mask: str, num_blocks: int) -> None:
    """Smaller and larger ones."""
    count = _run(mask, num_blocks, max_examples=60)
    assert count["hit tokens"] > 0
    assert num_blocks < 10 or mask == "constant hash" or count["duplicates"] > 0


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(900)
def test_laws_where_hits_go_stale_and_blocks_are_awaited() -> None:
    """Both are rare: a thousand examples may have none."""
    count: Counter[str] = Counter()
    for again in range(9):
        count += _run("honest", 24, max_examples=500, again=again)
        if count["stale"] and count["awaited"]:
            return
    pytest.fail(f"{count} in thousands of examples")


def test_the_hint_is_part_of_the_hash() -> None:
    """The masks above mean what they say: "one hint" leaves different hashes with one hint."""
    hasher = ForgedHasher(a_fingerprint(), MASKS["one hint"])
    chain = hasher.chain(hasher.root(), pack_tokens(range(8)))
    assert chain[0] != chain[1]
    assert {hint(block_hash) for block_hash in chain} == {0}
