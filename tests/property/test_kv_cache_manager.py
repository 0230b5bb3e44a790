"""The cache's laws under random steps: admit, grow, preempt, commit, abort, evict, pin, unpin, clear.

Beside the manager run: the KV memory that a model would have written (a hit is wrong exactly when
it shows another prompt's tokens), an obviously correct cache (`NaiveCache`), and a subscriber.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from cache import events
from cache.block_hash import BlockHasher, hint, hints
from cache.errors import BlocksAwaited, BlocksInUse, NoFreeBlocks, PinsFull, StaleHit
from cache.events import EventLog, Load
from cache.kv_cache_manager import KVCacheManager, PrefixHit, SequenceBlocks
from cache.types import PinId, pack_tokens
from tests.fakes.cache import ForgedHasher, NaiveCache, Subscriber, a_fingerprint, check_pool, check_sequence

BLOCK_SIZE = 2
MAX_SEQUENCES = 5

# What of a block hash survives: all; nothing; two bits; everything but what the router sees.
MASKS = {
    "honest": b"\xff" * 16,
    "constant hash": bytes(16),
    "four hashes": b"\x03" + bytes(15),
    "one hint": bytes(8) + b"\xff" * 8,
}


@dataclass(eq=False)
class Tracked:
    """A sequence and what the scheduler would know of it."""

    blocks: SequenceBlocks
    num_computed: int = 0  # tokens with keys and values, this step's included


class Driver:
    """Plays acts against the manager as a scheduler would, and checks every law after each.

    An act is (verb, pick, amount, is_so); what a verb makes of the last three is written in its method.
    One list of such acts is an example: unlike a rule-based machine, whose examples each leave most
    rules out, nearly all of them come to hits, duplicates and evictions.
    """

    def __init__(self, mask: bytes, num_blocks: int) -> None:
        mark = a_fingerprint(block_size=BLOCK_SIZE)
        self.is_honest = mask == MASKS["honest"]
        self.hasher = BlockHasher(mark) if self.is_honest else ForgedHasher(mark, mask)
        self.log = EventLog(epoch=1)
        self.max_pinned = num_blocks // 2
        self.manager = KVCacheManager(
            num_blocks, self.hasher, block_size=BLOCK_SIZE, sink=self.log, max_pinned=self.max_pinned
        )
        self.naive = NaiveCache(num_blocks, BLOCK_SIZE)
        self.subscriber = Subscriber()
        self.sequences: list[Tracked] = []
        self.step: dict[Tracked, int] = {}  # sequence -> its first token of this step
        self.slots: dict[tuple[int, int], Any] = {}  # (block id, offset) -> what it was computed from
        self.old_hits: dict[Tracked, PrefixHit] = {}
        self.pinned: dict[PinId, dict[int, list[Any]]] = {}  # block id -> what its slots held when pinned
        self.promised: dict[PinId, int] = {}
        self.num_pins = 0
        self.count: Counter[str] = Counter()
        self.parent_of: dict[int, int | None] = {}  # hint -> parent's

    def play(self, verb: str, pick: int, amount: int, is_so: bool) -> None:
        getattr(self, verb)(pick, amount, is_so)
        self.check_laws()
        if self.is_honest:
            self.check_against_naive()

    # -- what the scheduler does ----------------------------------------------------------------

    def begin(self, pick: int, amount: int, is_so: bool) -> None:
        """A prompt of up to 11 equal tokens, or with one unlike the others: most share a prefix."""
        if len(self.sequences) == MAX_SEQUENCES:
            return
        token_ids = pack_tokens([0] * (1 + amount % 11))
        if is_so:
            token_ids[pick % len(token_ids)] = 1
        salt = "s" if pick == 7 else ""
        extra_keys = {1: (b"image",)} if pick == 6 else {}
        root = self.hasher.root(salt=salt)
        sent = self.hasher.chain(root, token_ids, extra_keys) if pick % 2 else []
        blocks = self.manager.begin(token_ids, salt=salt, extra_keys=extra_keys, block_hashes=sent)
        assert blocks.block_hashes == sent
        self.sequences.append(Tracked(blocks))

    def look(self, pick: int, amount: int, is_so: bool) -> None:
        """Look up now, admit later: the hit may be evicted in between."""
        if (sequence := _pick(self._idle(), pick)) is not None:
            before = self._state()
            self.old_hits[sequence] = self._match(sequence)
            assert self._state() == before

    def admit(self, pick: int, amount: int, is_so: bool) -> None:
        """The whole rest of the prompt, or a chunk of it; with the hit from `look` if there is one."""
        if (sequence := _pick(self._idle(), pick)) is None:
            return
        old_hit = self.old_hits.pop(sequence, None)
        hit = old_hit or self._match(sequence)
        left = len(sequence.blocks.token_ids) - hit.num_tokens
        num_tokens = 1 + amount % left if is_so else left
        needed = self.manager.blocks_needed(sequence.blocks, hit, num_tokens)
        before, free = self._state(), self.manager.num_free
        try:
            self.manager.admit(sequence.blocks, hit, num_tokens)
        except NoFreeBlocks:
            assert self._state() == before
            assert old_hit is not None or needed > free
            return
        except StaleHit:
            assert self._state() == before
            assert self._match(sequence).block_ids[: len(hit.block_ids)] != hit.block_ids
            self.count["stale"] += 1
            return
        assert old_hit is not None or free - self.manager.num_free == needed <= free
        self.count["hits"] += len(hit.block_ids)
        self._schedule(sequence, hit, hit.num_tokens + num_tokens)

    def grow(self, pick: int, amount: int, is_so: bool) -> None:
        """A sampled token, or a further chunk of the prompt."""
        if (sequence := _pick(self._running(), pick)) is None:
            return
        token_ids = sequence.blocks.token_ids
        if sequence.num_computed == len(token_ids):
            token_ids.append(is_so)
        num_tokens = min(sequence.num_computed + 1 + amount, len(token_ids))
        before = self._state()
        try:
            self.manager.grow(sequence.blocks, num_tokens)
        except NoFreeBlocks:
            assert self._state() == before
            return
        self._schedule(sequence, None, num_tokens)

    def fork(self, pick: int, amount: int, is_so: bool) -> None:
        """Up to three begin with what another has computed, and compute a token of their own."""
        parents = [sequence for sequence in self._running() if sequence.num_computed > 1]
        if self.step or (parent := _pick(parents, pick)) is None:
            return
        num_tokens = 1 + amount % (parent.num_computed - 1)
        children = []
        for _ in range(1 + amount % 3):
            blocks, before = self._twin(parent, num_tokens + 1), self._state()
            try:
                self.manager.fork(parent.blocks, blocks, num_tokens)
            except NoFreeBlocks:
                assert self._state() == before
                assert self.manager.num_free == 0
                break
            assert self.manager.num_free == before[3].free - 1
            if self.is_honest:
                self.naive.fork(parent.blocks, blocks, num_tokens)
            children.append(Tracked(blocks, num_tokens))
            self.sequences.append(children[-1])
        for child in children:
            self.manager.grow(child.blocks, num_tokens + 1)
            self._schedule(child, None, num_tokens + 1)
            self.count["forks"] += 1

    def _twin(self, sequence: Tracked, num_tokens: int) -> SequenceBlocks:
        """Nothing but the same first tokens."""
        salt = "s" if sequence.blocks.root == self.hasher.root(salt="s") else ""
        token_ids = sequence.blocks.token_ids[:num_tokens]
        return self.manager.begin(token_ids, salt=salt, extra_keys=sequence.blocks.extra_keys)

    def release(self, pick: int, amount: int, is_so: bool) -> None:
        """Preempted or finished, inside a step or between two."""
        if (sequence := _pick(self.sequences, pick)) is None:
            return
        before = self._state()
        try:
            self.manager.release(sequence.blocks)
        except BlocksAwaited:
            assert self._state() == before
            assert sequence in self.step
            self.count["awaited"] += 1
            if self.is_honest:
                with pytest.raises(BlocksAwaited):
                    self.naive.release(sequence.blocks)
            return
        self.naive.release(sequence.blocks)
        self.manager.release(sequence.blocks)  # idempotent
        self.step.pop(sequence, None)
        sequence.num_computed = 0
        if is_so:
            self.sequences.remove(sequence)
            self.old_hits.pop(sequence, None)

    def commit(self, pick: int, amount: int, is_so: bool) -> None:
        """Forks copy, every sequence writes its keys and values, and then reads all that its table shows."""
        for child, first in self.step.items():
            if (source := child.blocks.copy_source) is not None:
                target = child.blocks.block_table[first // BLOCK_SIZE]
                for offset in range(first % BLOCK_SIZE):
                    self.slots[target, offset] = self.slots[source, offset]
        for sequence, first in self.step.items():
            for position in range(first, sequence.num_computed):
                self.slots[self._slot(sequence, position)] = self._computed_from(sequence, position)
        self.step.clear()
        self.manager.commit_step()
        self.naive.commit_step()
        for sequence in self.sequences:
            for position in range(sequence.num_computed):
                held = self.slots[self._slot(sequence, position)]
                assert held == self._computed_from(sequence, position), "another prefix's keys and values"

    def abort(self, pick: int, amount: int, is_so: bool) -> None:
        """The forward raised halfway: what it wrote is garbage, and its sequences start again."""
        for sequence, first in self.step.items():
            for position in range(first, sequence.num_computed):
                self.slots[self._slot(sequence, position)] = "garbage"
        self.manager.abort_step()
        self.naive.abort_step()
        check_pool(self.manager.pool, self._tables())
        for sequence in self.step:
            self.manager.release(sequence.blocks)
            self.naive.release(sequence.blocks)
            sequence.num_computed = 0
        self.step.clear()

    def pin(self, pick: int, amount: int, is_so: bool) -> None:
        """Hold a prefix that is cached, under the name it was promised for or a new one."""
        if self.step or (sequence := _pick(self.sequences, pick)) is None:
            return
        num_blocks = 1 + amount % max(1, len(sequence.blocks.token_ids) // BLOCK_SIZE)
        if num_blocks * BLOCK_SIZE > len(sequence.blocks.token_ids):
            return
        pin_id = next(iter(self.promised), None) if is_so else None
        pin_id = pin_id or self._new_pin()
        before, pins = self._state(), self.manager.pins
        try:
            is_held = self.manager.pin(pin_id, sequence.blocks, num_blocks)
        except PinsFull as error:
            assert self._state() == before
            others = sum(promised for other, promised in self.promised.items() if other != pin_id)
            self._check_unfit(error, self.max_pinned - pins.num_blocks - others)
            self.count["unfit"] += 1
            return
        if self.is_honest:
            assert is_held == self.naive.pin(pin_id, sequence.blocks, num_blocks)
        if is_held:
            self.promised.pop(pin_id, None)
            self.pinned[pin_id] = {
                block.block_id: [self.slots[block.block_id, at] for at in range(BLOCK_SIZE)]
                for block in pins.blocks(pin_id)
            }
            self.count["pins"] += 1
        else:
            assert self._state() == before

    def promise(self, pick: int, amount: int, is_so: bool) -> None:
        """Room for a prefix that is to be computed."""
        if (sequence := _pick(self.sequences, pick)) is None:
            return
        num_blocks, pin_id, before = (
            len(sequence.blocks.token_ids) // BLOCK_SIZE,
            self._new_pin(),
            self._state(),
        )
        left = self.manager.pins.left
        try:
            self.manager.promise_pin(pin_id, sequence.blocks, num_blocks)
        except PinsFull as error:
            assert self._state() == before
            self._check_unfit(error, left)
            return
        self.promised[pin_id] = left - self.manager.pins.left

    def unpin(self, pick: int, amount: int, is_so: bool) -> None:
        """Expired, deleted, or its computation came to nothing; inside a step or between two."""
        if (pin_id := _pick([*self.pinned, *self.promised], pick)) is None:
            return
        assert self.manager.unpin(pin_id)
        assert not self.manager.unpin(pin_id)
        self.naive.unpin(pin_id)
        self.pinned.pop(pin_id, None)
        self.promised.pop(pin_id, None)

    def clear(self, pick: int, amount: int, is_so: bool) -> None:
        if self.pinned or any(s.blocks.block_table for s in self.sequences):
            before = self._state()
            with pytest.raises(BlocksInUse):
                self.manager.clear()
            assert self._state() == before
        elif pick == 0:
            self.manager.clear()
            self.naive.prefix_of.clear()
            assert self.manager.stats().cached == 0

    # -- what the router sees -------------------------------------------------------------------

    def flush(self, pick: int, amount: int, is_so: bool) -> None:
        """A batch reaches the subscriber; or a late one starts from a snapshot, changes pending."""
        if is_so:
            self._join()
        with mock.patch.object(
            events, "MAX_CHANGES_PER_BATCH", 1 + amount
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

    def check_pins(self) -> None:
        """They keep their bound; what they hold is in nobody's way but theirs, and stays as it was."""
        pins, blocks = self.manager.pins, self.manager.pool.blocks
        held = {block_id for content in self.pinned.values() for block_id in content}
        assert self.manager.stats().pinned == pins.num_blocks == len(held)
        assert len(held) + sum(self.promised.values()) == self.max_pinned - pins.left <= self.max_pinned
        assert len(pins) == len(self.pinned)
        for content in self.pinned.values():
            for block_id, slots in content.items():
                assert blocks[block_id].block_hash is not None, "a pinned block was evicted"
                assert [self.slots[block_id, at] for at in range(BLOCK_SIZE)] == slots, "and written over"

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

    def _idle(self) -> list[Tracked]:
        return [sequence for sequence in self.sequences if not sequence.blocks.block_table]

    def _running(self) -> list[Tracked]:
        return [s for s in self.sequences if s.blocks.block_table and s not in self.step]

    def _match(self, sequence: Tracked) -> PrefixHit:
        hit = self.manager.match(sequence.blocks)
        assert hit.num_tokens == len(hit.block_ids) * BLOCK_SIZE < len(sequence.blocks.token_ids)
        if self.is_honest:
            assert list(hit.block_ids) == self.naive.match(sequence.blocks)
        return hit

    def _schedule(self, sequence: Tracked, hit: PrefixHit | None, num_tokens: int) -> None:
        if hit is not None:
            sequence.num_computed = hit.num_tokens
        if self.is_honest:
            self.naive.schedule(sequence.blocks, list(hit.block_ids) if hit else [], num_tokens)
        self.step[sequence] = sequence.num_computed
        sequence.num_computed = num_tokens
        self.count["refused"] += sequence.blocks.num_offered > sum(
            self.manager.pool.blocks[block_id].block_hash is not None
            for block_id in sequence.blocks.block_table
        )
        chain = hints(sequence.blocks.block_hashes)
        self.parent_of.update(zip(chain, [None, *chain], strict=False))

    def _slot(self, sequence: Tracked, position: int) -> tuple[int, int]:
        return sequence.blocks.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE

    def _computed_from(self, sequence: Tracked, position: int) -> tuple[Any, ...]:
        blocks = sequence.blocks
        keys = [blocks.extra_keys.get(index, ()) for index in range(position // BLOCK_SIZE + 1)]
        return blocks.root, list(blocks.token_ids[: position + 1]), keys

    def _state(self) -> tuple[Any, ...]:
        """Everything that a refused call must leave as it was."""
        pool = self.manager.pool
        return (
            [block.block_id for block in pool.free_queue],
            [(block.ref_count, block.block_hash) for block in pool.blocks],
            [list(sequence.blocks.block_table) for sequence in self.sequences],
            self.manager.stats(),
            self.manager.pins.left,
        )


_Item = TypeVar("_Item")


def _pick(items: list[_Item], pick: int) -> _Item | None:
    return items[pick % len(items)] if items else None


# How often each verb comes: as in a busy engine, with more preemption and failure than any should see.
VERBS = [
    *["begin"] * 5, *["admit"] * 6, *["grow"] * 8, *["commit"] * 5, *["release"] * 4, *["flush"] * 2,
    *["pin"] * 3, *["unpin"] * 2, *["fork"] * 2, "promise", "look", "abort", "clear",
]  # fmt: skip
ACTS = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 7), st.integers(0, 10), st.booleans()),
    min_size=40,
    max_size=150,
)


def _run(mask: str, num_blocks: int, max_examples: int, again: int = 0) -> Counter[str]:
    """What happened how often, so that a test can tell that it has seen what it is about.

    again: other examples for each number.
    """
    count: Counter[str] = Counter()

    @settings(max_examples=max_examples)
    @given(acts=ACTS)
    def play(acts: list[tuple[str, int, int, bool]]) -> None:
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
    count = _run(mask, num_blocks, max_examples=60)
    assert count["hits"] > 0
    assert count["removals"] > 0
    assert count["pins"] > 0
    assert count["forks"] > 0
    assert (count["refused"] > 0) == (mask in ("constant hash", "four hashes"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_blocks", [3, 6, 14, 24])
@pytest.mark.parametrize("mask", MASKS)
def test_laws_long(mask: str, num_blocks: int) -> None:
    count = _run(mask, num_blocks, max_examples=500)
    if num_blocks >= 10:
        for again in range(1, 9):  # what is stale is rare: a thousand examples may have none
            if not count["stale"]:
                count += _run(mask, num_blocks, max_examples=500, again=again)
        assert all(count[name] > 0 for name in ("hits", "removals", "stale", "awaited"))
        assert mask == "constant hash" or count["duplicates"] > 0


def test_the_hint_is_part_of_the_hash() -> None:
    """The masks above mean what they say: "one hint" leaves different hashes with one hint."""
    hasher = ForgedHasher(a_fingerprint(), MASKS["one hint"])
    chain = hasher.chain(hasher.root(), pack_tokens(range(8)))
    assert chain[0] != chain[1]
    assert {hint(block_hash) for block_hash in chain} == {0}
