"""Choosing a discipline, and what merging does and leaves alone."""

from __future__ import annotations

from array import array

import pytest

from cache.block_hash import BlockHasher
from cache.disciplines import PAGED, CacheDiscipline, paged_cache
from cache.errors import ConfigError, StaleHit
from cache.event_log import EventLog
from cache.events import Load
from cache.kv_cache_manager import KVCacheManager, SequenceBlocks
from cache.merging import MergingKVCacheManager
from cache.radix_cache import RadixCache
from cache.types import PinId, pack_tokens
from replica.config import ReplicaConfig
from tests.fakes.cache import a_fingerprint, check_pool


def letters(text: str) -> array[int]:
    return pack_tokens(map(ord, text))


def start(manager: KVCacheManager | RadixCache, text: str, **begin: bool) -> SequenceBlocks:
    """Begun and computed, within the step."""
    sequence = manager.begin(letters(text), **begin)  # type: ignore[arg-type]
    hit = manager.match(sequence)
    manager.admit(sequence, hit, len(text) - hit.num_tokens)
    return sequence


class TestChoosing:
    @pytest.mark.parametrize(
        ("discipline", "kind"),
        [
            (CacheDiscipline.APPEND_ONLY, KVCacheManager),
            (CacheDiscipline.MERGE_ON_FILL, MergingKVCacheManager),
        ],
    )
    def test_each_has_its_manager(self, discipline: CacheDiscipline, kind: type[KVCacheManager]) -> None:
        manager = paged_cache(discipline, 10, BlockHasher(a_fingerprint()), block_size=4, max_pinned=3)
        assert type(manager) is kind
        assert (manager.pool.num_blocks, manager.pins.limit) == (10, 3)

    def test_a_tree_has_no_pages(self) -> None:
        with pytest.raises(ConfigError, match="must be one of append_only, merge_on_fill"):
            paged_cache(CacheDiscipline.RADIX_TREE, 10, BlockHasher(a_fingerprint()), block_size=4)

    def test_a_replicas_config_offers_what_has_pages(self) -> None:
        for discipline in PAGED:
            assert ReplicaConfig(cache_discipline=discipline.value).cache_discipline == discipline
        with pytest.raises(ConfigError, match="cache_discipline = 'radix_tree'"):
            ReplicaConfig(cache_discipline="radix_tree")


@pytest.mark.parametrize("discipline", CacheDiscipline)
def test_who_is_allowed_hits_takes_them_from_then_on(discipline: CacheDiscipline) -> None:
    hasher = BlockHasher(a_fingerprint())
    cache: KVCacheManager | RadixCache = (
        RadixCache(30, hasher)
        if discipline is CacheDiscipline.RADIX_TREE
        else paged_cache(discipline, 10, hasher, block_size=4)
    )
    sequence = start(cache, "ABCDEFGHI", looks_up=False)
    cache.commit_step()
    cache.release(sequence)
    assert cache.match(sequence).num_tokens == 0
    cache.allow_hits(sequence)
    hit = cache.match(sequence)
    assert hit.num_tokens == 8
    cache.admit(sequence, hit, 1)


def test_without_a_prefix_cache_nobody_is_allowed_hits() -> None:
    cache = KVCacheManager(10, BlockHasher(a_fingerprint()), block_size=4, prefix_caching=False)
    sequence = cache.begin(letters("ABCDEFGHI"))
    cache.allow_hits(sequence)
    assert not sequence.looks_up


class TestMerging:
    """Blocks of four. Who does not look up computes what is cached, into blocks of its own."""

    def manager(self, log: EventLog | None = None) -> MergingKVCacheManager:
        return MergingKVCacheManager(10, BlockHasher(a_fingerprint()), block_size=4, sink=log, max_pinned=4)

    def test_a_step_writes_into_its_own_blocks_and_the_commit_returns_them(self) -> None:
        manager = self.manager()
        first = start(manager, "ABCDEFGHI")
        manager.commit_step()
        second = start(manager, "ABCDEFGHI", looks_up=False)
        assert second.block_table == [3, 4, 5]
        manager.commit_step()
        assert second.block_table == [0, 1, 5]
        assert [block.block_id for block in manager.pool.free_queue] == [4, 3, 6, 7, 8, 9]
        check_pool(manager.pool, [first.block_table, second.block_table])

    def test_two_of_one_step_are_merged_too(self) -> None:
        manager = self.manager()
        sequences = [start(manager, "ABCDEFGHI", looks_up=False) for _ in range(2)]
        manager.commit_step()
        assert [s.block_table for s in sequences] == [[0, 1, 2], [0, 1, 5]]
        assert manager.pool.num_duplicates == 0

    def test_a_failed_step_merges_nothing(self) -> None:
        manager = self.manager()
        first = start(manager, "ABCDE")
        manager.commit_step()
        second = start(manager, "ABCDE", looks_up=False)
        manager.abort_step()
        assert second.block_table == [2, 3]
        manager.release(second)
        check_pool(manager.pool, [first.block_table])

    def test_a_twin_that_was_evicted_within_the_step_is_no_twin(self) -> None:
        manager = self.manager()
        manager.release(start(manager, "ABCDE"))  # not committed: gone
        first = start(manager, "ABCD")
        manager.commit_step()
        manager.release(first)
        second = start(manager, "ABCD", looks_up=False)
        filler = start(manager, "x" * 36, looks_up=False)  # every other block, the idle twin's too
        manager.commit_step()
        assert second.block_table[0] not in filler.block_table
        assert manager.match(manager.begin(letters("ABCDE"))).block_ids == tuple(second.block_table)
        check_pool(manager.pool, [second.block_table, filler.block_table])

    def test_a_pinned_twin_stays_pinned(self) -> None:
        manager = self.manager()
        first = start(manager, "ABCDE")
        manager.commit_step()
        assert manager.pin(PinId("p"), first, 1)
        manager.release(first)
        second = start(manager, "ABCDE", looks_up=False)
        manager.commit_step()
        assert second.block_table[0] == 0
        manager.release(second)
        assert (manager.stats().pinned, manager.stats().used) == (1, 1)

    def test_routers_hear_nothing_of_it(self) -> None:
        log = EventLog(epoch=1)
        manager = self.manager(log)
        start(manager, "ABCDE")
        manager.commit_step()
        log.flush(Load())
        start(manager, "ABCDE", looks_up=False)
        manager.commit_step()
        assert not log.has_changes


class TestRadixCache:
    def test_it_shares_to_the_token(self) -> None:
        cache = RadixCache(30, BlockHasher(a_fingerprint()))
        first = start(cache, "ABCDEFG")
        cache.commit_step()
        hit = cache.match(cache.begin(letters("ABCDExy")))
        assert (hit.num_tokens, hit.num_idle) == (5, 0)
        cache.release(first)
        assert cache.match(cache.begin(letters("ABCDExy"))).num_idle == 5
        assert cache.match(cache.begin(letters("ABCDExy"), salt="s")).num_tokens == 0

    def test_a_leaf_loses_as_many_tokens_as_are_needed(self) -> None:
        cache = RadixCache(10, BlockHasher(a_fingerprint()))
        first = start(cache, "ABCDEFGH")
        cache.commit_step()
        cache.release(first)
        start(cache, "xyzu")
        assert cache.match(cache.begin(letters("ABCDEFGHI"))).num_tokens == 6

    def test_an_old_hit_is_refused_once_a_part_of_it_is_gone(self) -> None:
        cache = RadixCache(10, BlockHasher(a_fingerprint()))
        first = start(cache, "ABCDEFGH")
        cache.commit_step()
        cache.release(first)
        waiting = cache.begin(letters("ABCDEFGHI"))
        hit = cache.match(waiting)
        filler = start(cache, "xyzu")
        cache.commit_step()
        cache.release(filler)
        with pytest.raises(StaleHit):
            cache.admit(waiting, hit, 1)

    def test_another_salts_root_goes_with_its_last_token(self) -> None:
        """Salts come from clients: what is kept per salt must have an end."""
        cache = RadixCache(4, BlockHasher(a_fingerprint()))
        for number in range(50):
            sequence = cache.begin(letters("ABC"), salt=str(number))
            cache.admit(sequence, cache.match(sequence), 3)
            cache.commit_step()
            cache.release(sequence)
        assert len(cache.tree.roots()) <= 2

    def test_without_slots(self) -> None:
        with pytest.raises(ConfigError, match="num_slots = 0"):
            RadixCache(0, BlockHasher(a_fingerprint()))
