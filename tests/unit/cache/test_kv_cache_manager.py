"""The manager's doors one by one; its laws under random use are in `tests/property/`."""

from __future__ import annotations

from array import array

import pytest

from cache.block_hash import BlockHasher, ExtraKeys, hints
from cache.block_pool import BlockContent, KVCacheBlock
from cache.errors import BlocksAwaited, BlocksInUse, ConfigError, NoFreeBlocks, StaleHit
from cache.event_log import EventLog
from cache.events import Load
from cache.kv_cache_manager import KVCacheManager, PrefixHit
from cache.types import BlockHash
from tests.fakes.cache import ForgedHasher, ForgingHasher, a_fingerprint, check_pool
from tests.fakes.kv_cache import a_manager, letters, start


class CountingHasher(BlockHasher):
    """Counts the blocks it hashes."""

    hashed = 0

    def extend(
        self,
        parent: BlockHash,
        token_ids: array[int],
        first_block: int,
        last_block: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        self.hashed += max(last_block - first_block, 0)
        return super().extend(parent, token_ids, first_block, last_block, extra_keys)


class TestHashesFromTheRouter:
    def test_ours_are_taken_and_nothing_more_is_hashed_than_the_check(self) -> None:
        hasher = CountingHasher(a_fingerprint())
        chain = hasher.chain(hasher.root(salt="s"), letters("ABCDEFGHIJKLMNOPQ"))
        manager = a_manager(hasher=hasher)
        hasher.hashed = 0
        sequence = manager.begin(letters("ABCDEFGHIJKLMNOPQ"), salt="s", block_hashes=chain)
        assert sequence.block_hashes == chain
        manager.match(sequence)
        assert hasher.hashed == 2  # the first and the last

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda hasher, chain: hasher.chain(hasher.root(salt="other"), letters("ABCDEFGHI")),
            lambda hasher, chain: hasher.chain(hasher.root(), letters("XBCDEFGHI")),
            lambda hasher, chain: [chain[0], b"?" * 16],
            lambda hasher, chain: [*chain, b"?" * 16],
        ],
        ids=["another salt", "another prompt", "another second block", "more than there are full blocks"],
    )
    def test_others_are_recomputed(self, spoil) -> None:  # type: ignore[no-untyped-def]
        hasher = BlockHasher(a_fingerprint())
        chain = hasher.chain(hasher.root(), letters("ABCDEFGHI"))
        manager = a_manager()
        sequence = manager.begin(letters("ABCDEFGHI"), block_hashes=spoil(hasher, chain))
        assert sequence.block_hashes == []
        manager.match(sequence)
        assert sequence.block_hashes == chain

    def test_outputs_are_hashed_as_they_fill(self) -> None:
        """A continued request carries outputs beyond the hashes of its prompt's blocks."""
        hasher = BlockHasher(a_fingerprint())
        chain = hasher.chain(hasher.root(), letters("ABCDEFGHIJKL"))
        manager = a_manager()
        sequence = manager.begin(letters("ABCDEFGHIJKLM"), block_hashes=chain[:1])
        manager.admit(sequence, manager.match(sequence), 13)
        assert sequence.block_hashes == chain
        sequence.token_ids.extend(letters("NOP"))
        manager.grow(sequence, 16)
        assert sequence.block_hashes == hasher.chain(hasher.root(), letters("ABCDEFGHIJKLMNOP"))


class TestLookingUpAgain:
    def test_only_what_may_have_come_since_is_looked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = a_manager()
        first = manager.begin(letters("ABCDEFGHIJKLMNOP"))
        manager.admit(first, manager.match(first), 8)
        manager.commit_step()
        asked: list[BlockHash] = []
        lookup = manager.pool.lookup

        def noted(block_hash: BlockHash, content: BlockContent) -> KVCacheBlock | None:
            asked.append(block_hash)
            return lookup(block_hash, content)

        monkeypatch.setattr(manager.pool, "lookup", noted)
        second = manager.begin(letters("ABCDEFGHIJKLMNOPQ"))
        assert manager.match(second).block_ids == (0, 1)
        assert asked == second.block_hashes[:3], "two that are there, one that is not"
        manager.grow(first, 12)
        manager.commit_step()
        asked.clear()
        assert manager.match(second).block_ids == (0, 1, 2)
        assert asked == second.block_hashes[2:4]

    def test_after_a_removal_all_is_looked_for(self) -> None:
        manager = a_manager(num_blocks=4)
        first, _ = start(manager, "ABCDEFGH")
        manager.commit_step()
        manager.release(first)
        second = manager.begin(letters("ABCDEFGHI"))
        assert manager.match(second).num_tokens == 8
        other, _ = start(manager, "stuvwxyzstuv")  # takes the second block, the last that was given back
        manager.commit_step()
        assert manager.match(second).num_tokens == 4
        manager.release(other)


class TestCachingOff:
    def test_nothing_is_hashed_registered_or_hit(self) -> None:
        hasher = CountingHasher(a_fingerprint())
        manager = KVCacheManager(10, hasher, block_size=4, prefix_caching=False)
        sent = [BlockHash(b"x" * 16)]
        first = manager.begin(letters("ABCDEFGHI"), salt="s", block_hashes=sent)
        manager.admit(first, manager.match(first), 9)
        first.token_ids.extend(letters("JKLM"))
        manager.grow(first, 13)
        manager.commit_step()
        again = manager.begin(letters("ABCDEFGHI"))
        assert manager.match(again) == PrefixHit((), 0, 0)
        assert manager.stats().cached == hasher.hashed == 0
        assert first.block_table == [0, 1, 2, 3]
        manager.release(first)
        manager.clear()
        assert manager.stats().free == 10


class TestAdmission:
    def test_idle_hit_blocks_do_not_count_as_free(self) -> None:
        manager = a_manager(num_blocks=4)
        first, _ = start(manager, "ABCDEFGH")
        manager.commit_step()
        manager.release(first)
        second = manager.begin(letters("ABCDEFGHIJKLMNOPQ"))
        hit = manager.match(second)
        assert (hit.block_ids, hit.num_idle, manager.num_free) == ((0, 1), 2, 4)
        assert manager.blocks_needed(second, hit, 9) == 5
        with pytest.raises(NoFreeBlocks) as caught:
            manager.admit(second, hit, 9)
        assert (caught.value.needed, caught.value.free) == (5, 4)
        assert second.block_table == []
        assert [block.block_id for block in manager.pool.free_queue] == [2, 3, 1, 0]
        manager.admit(second, hit, 8)
        assert second.block_table == [0, 1, 2, 3]

    def test_a_prompt_in_chunks_registers_what_is_scheduled(self) -> None:
        manager = a_manager()
        sequence = manager.begin(letters("ABCDEFGHIJ"))
        manager.admit(sequence, manager.match(sequence), 6)
        assert (sequence.block_table, manager.stats().cached) == ([0, 1], 1)
        manager.commit_step()
        manager.grow(sequence, 10)
        assert (sequence.block_table, manager.stats().cached) == ([0, 1, 2], 2)

    def test_growth_that_does_not_fit_changes_nothing(self) -> None:
        manager = a_manager(num_blocks=2)
        sequence, _ = start(manager, "ABCDEFG")
        sequence.token_ids.extend(letters("HI"))
        with pytest.raises(NoFreeBlocks):
            manager.grow(sequence, 9)
        assert (sequence.block_table, manager.stats().cached) == ([0, 1], 1)
        manager.grow(sequence, 8)
        assert manager.stats().cached == 2

    def test_a_hit_evicted_since_the_lookup_is_refused(self) -> None:
        manager = a_manager(num_blocks=3)
        first, _ = start(manager, "ABCDEFGH")
        manager.commit_step()
        manager.release(first)
        second = manager.begin(letters("ABCDEFGHI"))
        hit = manager.match(second)
        other, _ = start(manager, "stuvwxyz")
        manager.commit_step()
        manager.release(other)
        with pytest.raises(StaleHit):
            manager.admit(second, hit, 1)
        assert second.block_table == []
        assert manager.match(second).block_ids == (0,)

    def test_a_hit_that_survived_an_eviction_is_taken(self) -> None:
        manager = a_manager(num_blocks=4)
        first, _ = start(manager, "ABCDEFGH")
        keeper, _ = start(manager, "ABCDX")
        manager.commit_step()
        manager.release(first)
        second = manager.begin(letters("ABCDZ"))
        hit = manager.match(second)
        start(manager, "st")
        start(manager, "uv")  # evicts EFGH, not ABCD
        assert manager.pool.removals > hit.removals
        manager.release(keeper)
        manager.admit(second, hit, 1)
        assert second.block_table[0] == 0

    def test_tokens_that_are_not_there_cannot_be_scheduled(self) -> None:
        manager = a_manager()
        sequence = manager.begin(letters("ABC"))
        with pytest.raises(AssertionError, match="no such tokens"):
            manager.admit(sequence, manager.match(sequence), 4)
        manager.admit(sequence, manager.match(sequence), 3)
        with pytest.raises(AssertionError, match="admitted twice"):
            manager.admit(sequence, manager.match(sequence), 3)
        with pytest.raises(AssertionError, match="no such tokens"):
            manager.grow(sequence, 4)
        assert manager.stats().used == 1


class TestOneStep:
    def test_a_twin_in_the_same_step_shares(self) -> None:
        manager = a_manager()
        _, nothing = start(manager, "ABCDEFGHI")
        twin, hit = start(manager, "ABCDEFGHI")
        assert nothing.num_tokens == 0
        assert (hit.block_ids, hit.num_tokens, hit.num_idle) == ((0, 1), 8, 0)
        assert twin.block_table == [0, 1, 3]

    def test_a_failed_step_is_forgotten_by_twins_too(self) -> None:
        manager = a_manager()
        before, _ = start(manager, "ABCDX")
        manager.commit_step()
        first, _ = start(manager, "ABCDEFGHI")
        twin, hit = start(manager, "ABCDEFGHI")
        assert hit.num_tokens == 8
        manager.abort_step()
        assert manager.stats().cached == 1  # ABCD was computed before
        check_pool(manager.pool, [before.block_table, first.block_table, twin.block_table])
        # Even a sequence wrongly kept cannot register behind what was forgotten.
        twin.token_ids.extend(letters("JKL"))
        manager.grow(twin, 12)
        assert manager.stats().cached == 1
        manager.release(first)
        manager.release(twin)
        assert manager.match(twin).block_ids == (0,)

    def test_a_failed_step_takes_back_children_before_parents(self) -> None:
        """Its blocks may be announced already, and a large removal goes out in several batches."""
        log = EventLog(epoch=1)
        manager = KVCacheManager(10, BlockHasher(a_fingerprint()), block_size=4, sink=log)
        sequence, _ = start(manager, "ABCDEFGHIJKLM")
        stored = log.flush(Load()).stored
        assert stored == tuple(hints(sequence.block_hashes))
        manager.abort_step()
        assert log.flush(Load()).removed == stored[::-1]

    def test_a_sequence_preempted_in_the_step_takes_its_promises_along(self) -> None:
        manager = a_manager()
        victim, _ = start(manager, "ABCDEFGHI")
        manager.release(victim)
        assert manager.stats().cached == 0
        assert manager.match(victim).num_tokens == 0
        manager.commit_step()
        assert manager.stats().cached == 0

    def test_a_sequence_whose_twin_waits_for_it_is_released_after_the_step(self) -> None:
        manager = a_manager()
        first, _ = start(manager, "ABCDEFGHI")
        assert not manager.is_awaited(first)
        twin, _ = start(manager, "ABCDEFGHI")
        assert manager.is_awaited(first)
        assert not manager.is_awaited(twin)
        with pytest.raises(BlocksAwaited):
            manager.release(first)
        assert first.block_table == [0, 1, 2]
        manager.commit_step()
        assert not manager.is_awaited(first)
        manager.release(first)
        assert manager.match(first).block_ids == (0, 1)

    def test_a_released_twin_frees_the_other(self) -> None:
        manager = a_manager()
        first, _ = start(manager, "ABCDEFGHI")
        twin, _ = start(manager, "ABCDEFGHI")
        manager.release(twin)
        assert manager.stats().cached == 2
        manager.release(first)
        assert manager.stats().cached == 0


class TestIsolation:
    def test_salt_and_adapter_separate(self) -> None:
        manager = a_manager()
        start(manager, "ABCDEFGHI", salt="s")
        manager.commit_step()
        assert start(manager, "ABCDEFGHI", salt="s")[1].num_tokens == 8
        for begin in ({}, {"salt": "t"}, {"salt": "s", "adapter": "a"}, {"salt": "s", "adapter_digest": "d"}):
            sequence = manager.begin(letters("ABCDEFGHI"), **begin)  # type: ignore[arg-type]
            assert manager.match(sequence).num_tokens == 0

    def test_a_hash_that_always_collides_never_shows_another_prompt(self) -> None:
        manager = a_manager(num_blocks=20, hasher=ForgedHasher(a_fingerprint(), mask=bytes(16)))
        first, _ = start(manager, "AAAAAAAAAAAAA")
        assert manager.stats().cached == 1  # its second block collides with its first, and none follows
        manager.commit_step()
        assert start(manager, "AAAAAAAAB")[1].block_ids == (0,)
        assert start(manager, "BAAAAAAAB")[1].block_ids == ()
        assert start(manager, "AAAAA", salt="s")[1].block_ids == ()
        manager.commit_step()
        manager.release(first)
        check = manager.begin(letters("AAAAAAAAA"))
        assert manager.match(check).block_ids == (0,)

    def test_a_block_hash_forged_to_equal_the_root_does_not_move_blocks(self) -> None:
        """Block 1 after such a block has the root as parent, as a block 0 has: its place tells them apart."""

        class RootTwin(ForgingHasher):
            def forged(self, honest: BlockHash, token_ids: array[int]) -> BlockHash:
                return self.root() if token_ids == letters("evil") else honest

        manager = a_manager(hasher=RootTwin(a_fingerprint()))
        start(manager, "evilABCD")
        manager.commit_step()
        assert start(manager, "ABCDE")[1].block_ids == ()
        assert start(manager, "evilABCDE")[1].block_ids == (0, 1)


class TestWholeCache:
    def test_clear_forgets_and_refuses_while_in_use(self) -> None:
        manager = a_manager()
        sequence, _ = start(manager, "ABCDEFGHI")
        manager.commit_step()
        with pytest.raises(BlocksInUse, match="3 blocks"):
            manager.clear()
        assert manager.stats().cached == 2
        manager.release(sequence)
        manager.clear()
        assert manager.stats().cached == 0
        assert manager.match(sequence).num_tokens == 0

    def test_release_is_idempotent(self) -> None:
        manager = a_manager()
        sequence, _ = start(manager, "ABCDE")
        manager.commit_step()
        manager.release(sequence)
        manager.release(sequence)
        stats = manager.stats()
        assert (stats.total, stats.free, stats.used, stats.cached) == (10, 10, 0, 1)

    def test_the_hasher_shares_the_block_size(self) -> None:
        with pytest.raises(ConfigError, match="block_size = 8"):
            KVCacheManager(10, BlockHasher(a_fingerprint()), block_size=8)
