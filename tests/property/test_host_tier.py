"""The laws of two tiers under random steps: admit, grow, fork, swap out, commit, abort, a copy that fails.

Beside the manager run the memory that a model would have written, in blocks and in host slots, copied as
`take_moves` says (a hit is wrong exactly when it shows another prompt's tokens); and a subscriber.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings

from cache import event_log
from cache.block_hash import BlockHasher, hint, hints
from cache.disciplines import PAGED, CacheDiscipline, paged_cache
from cache.errors import NoFreeBlocks
from cache.event_log import EventLog
from cache.events import Digest, EventBatch, Load, digest_of
from cache.host_tier import HostTier
from cache.kv_cache_manager import PrefixHit, SequenceBlocks
from cache.types import BlockHash, HashHint
from tests.fakes.cache import ForgedHasher, a_fingerprint, check_pool, check_sequence
from tests.fakes.cache_acts import MAX_SEQUENCES, Act, CacheActs, Tracked, acts, picked, seen

BLOCK_SIZE = 2
# What of a block hash survives: all; two bits; everything but what routers see.
MASKS = {"honest": b"\xff" * 16, "four hashes": b"\x03" + bytes(15), "one hint": bytes(8) + b"\xff" * 8}


class TierSubscriber:
    """A router's view: everything that is held, and what of it host memory alone holds."""

    def __init__(self) -> None:
        self.held: set[HashHint] = set()
        self.hosted: set[HashHint] = set()

    def apply(self, batch: EventBatch) -> None:
        assert set(batch.removed) <= self.held
        self.held -= set(batch.removed)
        self.hosted -= {*batch.removed, *batch.stored}
        self.held |= {*batch.stored, *batch.hosted}
        self.hosted |= set(batch.hosted)
        assert batch.digest == digest_of(self.held)
        assert batch.host_digest == digest_of(self.hosted)


class Driver(CacheActs):
    """Against a manager with host memory behind it."""

    def __init__(self, discipline: CacheDiscipline, mask: bytes, num_blocks: int, num_slots: int) -> None:
        mark = a_fingerprint(block_size=BLOCK_SIZE)
        self.is_honest = mask == MASKS["honest"]
        self.hasher = BlockHasher(mark) if self.is_honest else ForgedHasher(mark, mask)
        self.log = EventLog(epoch=1)
        self.is_cheaper = True
        self.tier = HostTier(num_slots, self.log, is_cheaper=lambda cached, count: self.is_cheaper)
        self.manager = paged_cache(
            discipline, num_blocks, self.hasher, block_size=BLOCK_SIZE, host=self.tier, max_pinned=0
        )
        super().__init__(self.manager)
        self.host_slots: dict[tuple[int, int], Any] = {}  # (slot, offset) -> what its token was computed from
        self.subscriber = TierSubscriber()
        self.parent_of: dict[BlockHash, BlockHash | None] = {}

    # -- what the scheduler does ----------------------------------------------------------------

    def admit(self, pick: int, amount: int, is_so: bool) -> None:
        self.is_cheaper = pick % 3 > 0
        super().admit(pick, amount, is_so)

    def fork(self, pick: int, amount: int, is_so: bool) -> None:
        """One begins with what another has computed; it may be swapped out before its block is copied."""
        parents = [sequence for sequence in self._running() if sequence.num_computed > 1]
        if self.step or (parent := picked(parents, pick)) is None or len(self.sequences) == MAX_SEQUENCES:
            return
        num_tokens = 1 + amount % (parent.num_computed - 1)
        child = Tracked(self._twin(parent, num_tokens + 1), parent.salt, num_tokens)
        try:
            self.manager.fork(parent.blocks, child.blocks, num_tokens)
        except NoFreeBlocks:
            return
        self.sequences.append(child)
        if is_so:
            if self.manager.swap_out(child.blocks, num_tokens):
                child.num_computed = 0
                self.count["forks swapped"] += 1
                return
        self.manager.grow(child.blocks, num_tokens + 1)
        self._schedule(child, num_tokens, num_tokens + 1)

    def swap(self, pick: int, amount: int, is_so: bool) -> None:
        """Preempt one that has no part in the step."""
        if (sequence := picked(self._running(), pick)) is None or not sequence.num_computed:
            return
        if sequence.num_computed == len(sequence.blocks.token_ids):
            sequence.blocks.token_ids.append(is_so)  # sampled: there is always one to compute
        before = self.state()
        if not self.manager.swap_out(sequence.blocks, sequence.num_computed):
            assert self.state() == before
            self.count["no room"] += 1
            return
        sequence.num_computed = 0
        self.count["swapped"] += 1

    # -- steps ----------------------------------------------------------------------------------

    def commit(self, pick: int, amount: int, is_so: bool) -> None:
        """Copies are made before the forward."""
        self._copy()
        super().commit(pick, amount, is_so)
        stats = self.manager.stats()
        assert stats.host_cached + stats.host_swapped == stats.host_used <= stats.host_total

    def abort(self, pick: int, amount: int, is_so: bool) -> None:
        """The copies were made before it raised."""
        self._copy()
        super().abort(pick, amount, is_so)

    def fail_copy(self, pick: int, amount: int, is_so: bool) -> None:
        """A copy raised: nobody knows what host memory holds."""
        moves = self.manager.take_moves()
        if not moves:
            return
        self.host_slots = dict.fromkeys(self.host_slots, "garbage")
        for _, block_id in moves.loads:
            self.slots.update((_slot(block_id, at), "garbage") for at in range(BLOCK_SIZE))
        self.manager.forget_host()
        super().abort(pick, amount, is_so)
        assert self.manager.stats().host_used == 0
        self.count["copies failed"] += 1

    def _copy(self) -> None:
        moves = self.manager.take_moves()
        targets = [slot for _, slot in moves.saves], [block_id for _, block_id in moves.loads]
        assert all(len(set(names)) == len(names) for names in targets)
        saved = {
            (slot, at): self.slots.get(_slot(block_id, at))
            for block_id, slot in moves.saves
            for at in range(BLOCK_SIZE)
        }
        self.host_slots.update(saved)
        loaded = {
            _slot(block_id, at): self.host_slots[slot, at]
            for slot, block_id in moves.loads
            for at in range(BLOCK_SIZE)
        }
        self.slots.update(loaded)

    # -- beside what the scheduler does ---------------------------------------------------------

    def _begun(self, token_ids: array[int], salt: str, pick: int) -> SequenceBlocks:
        return self.manager.begin(token_ids, salt=salt, looks_up=(pick, len(token_ids)) != (5, 6))

    def _twin(self, parent: Tracked, num_tokens: int) -> SequenceBlocks:
        return self.manager.begin(parent.blocks.token_ids[:num_tokens], salt=parent.salt)

    def _match(self, sequence: Tracked) -> PrefixHit:
        hit = self.manager.match(sequence.blocks)
        assert hit.num_tokens < len(sequence.blocks.token_ids)
        return hit

    def _is_another(self, now: PrefixHit, hit: PrefixHit) -> bool:
        return (now.block_ids, now.slots) != (hit.block_ids, hit.slots)

    def _did_admit(self, hit: PrefixHit, *, needed: int, free: int) -> None:
        assert needed == free - self.manager.num_free
        self.count["copied back"] += len(hit.slots)
        self.count["declined"] += hit.num_declined
        self.count["resumed"] += hit.num_tokens % BLOCK_SIZE > 0

    def _did_schedule(self, sequence: Tracked, hit_ids: Sequence[int], first: int, num_tokens: int) -> None:
        chain = sequence.blocks.block_hashes
        self.parent_of.update(zip(chain, [None, *chain], strict=False))

    def _did_abort(self) -> None:
        check_pool(self.manager.pool, self._tables())

    def _did_clear(self) -> None:
        assert self.manager.stats().host_used == 0

    # -- laws -----------------------------------------------------------------------------------

    def flush(self, pick: int, amount: int, is_so: bool) -> None:
        """What routers hear, in batches of whatever size, is what there is; and so is a snapshot."""
        with mock.patch.object(event_log, "MAX_CHANGES_PER_BATCH", 1 + amount):
            self._flush_once()
            while self.log.has_changes:
                self._flush_once()
        in_pool, in_host = self.manager.pool.cached_hashes(), self.tier.hashes()
        assert self.subscriber.held == set(hints([*in_pool, *in_host]))
        assert self.subscriber.hosted == set(hints(in_host)) - set(hints(in_pool))
        snapshot = self.log.snapshot(Load())
        assert set(snapshot.hashes) == self.subscriber.held
        assert set(snapshot.hosted) == self.subscriber.hosted

    def _flush_once(self) -> None:
        self.subscriber.apply(self.log.flush(Load()))
        if self.is_honest:
            parents = {hint(child): parent and hint(parent) for child, parent in self.parent_of.items()}
            held, in_pool = self.subscriber.held, self.subscriber.held - self.subscriber.hosted
            for names in (held, in_pool):
                assert {parents[name] for name in names} - {None} <= names, "closed under parents, cut or not"

    def check_laws(self) -> None:
        pool, tier = self.manager.pool, self.tier
        check_pool(pool, self._tables())
        for sequence in self.sequences:
            check_sequence(self.manager, sequence.blocks)
        stats = self.manager.stats()
        assert stats.free + stats.used == stats.total
        assert (
            stats.host_cached + stats.host_swapped <= stats.host_used <= stats.host_total == tier.max_blocks
        )
        in_pool, in_host = set(pool.cached_hashes()), set(tier.hashes())
        assert not in_pool & in_host, "a block is in one tier"
        if self.is_honest:
            order = tier.hashes()
            for place, block_hash in enumerate(order):
                parent = self.parent_of[block_hash]
                assert parent is None or parent in in_pool or parent in order[place + 1 :], (
                    "leaves leave first"
                )

    def _tables(self) -> list[list[int]]:
        return [
            *(sequence.blocks.block_table for sequence in self.sequences),
            *([s.blocks.copy_source] for s in self.sequences if s.blocks.copy_source is not None),
        ]

    def state(self) -> tuple[Any, ...]:
        pool = self.manager.pool
        return (
            [block.block_id for block in pool.free_queue],
            [(block.ref_count, block.block_hash) for block in pool.blocks],
            [list(sequence.blocks.block_table) for sequence in self.sequences],
            self.manager.stats(),
            self.tier.hashes(),
        )


def _slot(block_id: int, offset: int) -> int:
    return block_id * BLOCK_SIZE + offset


VERBS = [
    *["begin"] * 5, *["admit"] * 7, *["grow"] * 7, *["commit"] * 6, *["release"] * 4, *["swap"] * 3,
    *["flush"] * 2, *["fork"] * 2, "reserve", "look", "abort", "fail_copy", "clear",
]  # fmt: skip


def _run(
    discipline: CacheDiscipline, mask: str, num_blocks: int, num_slots: int, max_examples: int
) -> Counter[str]:
    """What happened how often, so that a test can tell that it has seen what it is about."""
    count: Counter[str] = Counter()

    @settings(max_examples=max_examples)
    @given(played=acts(VERBS))
    def play(played: list[Act]) -> None:
        driver = Driver(discipline, MASKS[mask], num_blocks, num_slots)
        for act in played:
            driver.play(*act)
        count.update(driver.count)

    play()
    return count


@pytest.mark.parametrize(("mask", "num_blocks", "num_slots"), [("honest", 6, 8), ("four hashes", 8, 3)])
@pytest.mark.parametrize("discipline", PAGED)
def test_laws(discipline: CacheDiscipline, mask: str, num_blocks: int, num_slots: int) -> None:
    wanted = ["copied back", "swapped"]
    if mask == "honest":
        wanted += ["resumed", "copies failed", "declined"]
    else:  # host memory is small there
        wanted += ["no room"]
    seen(wanted, lambda _: _run(discipline, mask, num_blocks, num_slots, max_examples=50))


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(3, 1), (6, 20), (14, 5)])
@pytest.mark.parametrize("mask", MASKS)
def test_laws_long(mask: str, num_blocks: int, num_slots: int) -> None:
    for discipline in PAGED:
        _run(discipline, mask, num_blocks, num_slots, max_examples=25)


def test_digests_tell_the_tiers_apart() -> None:
    """A block that moves between tiers changes what host memory alone holds, and nothing else."""
    log = EventLog(epoch=1)
    name = BlockHash(bytes(15) + b"\x01")
    log.stored(name)
    stored = log.flush(Load())
    log.demoted(name)
    moved = log.flush(Load())
    assert (moved.stored, moved.removed, moved.hosted) == ((), (), (hint(name),))
    assert moved.digest == stored.digest
    assert (stored.host_digest, moved.host_digest) == (Digest(), digest_of([hint(name)]))
    log.promoted(name)
    log.demoted(name)
    assert not log.has_changes
