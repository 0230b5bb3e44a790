"""One behaviour suite for every cache discipline, and what they have in common.

Acts come as a scheduler's would, beside the K/V memory that a model would have written (`CacheActs`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from cache.block_hash import BlockHasher
from cache.disciplines import PAGED, CacheDiscipline, paged_cache
from cache.kv_cache_manager import KVCacheManager, SequenceBlocks
from cache.prefix_cache import PrefixCache
from cache.radix_cache import RadixCache
from cache.types import pack_tokens
from tests.fakes.cache import a_fingerprint, check_pool
from tests.fakes.cache_acts import MAX_SEQUENCES, Act, CacheActs, Tracked, acts
from tests.fakes.radix import check_tree


def make(discipline: CacheDiscipline, num_tokens: int, block_size: int) -> PrefixCache:
    """block_size: of those that have blocks."""
    hasher = BlockHasher(a_fingerprint(block_size=block_size))
    if discipline is CacheDiscipline.RADIX_TREE:
        return RadixCache(num_tokens, hasher)
    return paged_cache(discipline, num_tokens // block_size, hasher, block_size=block_size)


class Driver(CacheActs):
    """Against any discipline's cache; `answers` is what it said, act by act."""

    def __init__(self, cache: PrefixCache, *, one_at_a_time: bool = False) -> None:
        super().__init__(cache, one_at_a_time=one_at_a_time, most_with_forks=MAX_SEQUENCES)
        self.answers: list[Any] = []
        self.owned: dict[tuple[Tracked, int, int], int] = {}  # by sequence, `sharings` and blocks held

    def check_laws(self) -> None:
        stats = self.cache.stats()
        assert stats.free + stats.used == stats.total
        assert stats.free == self.cache.num_free
        tables = [sequence.blocks.block_table for sequence in self.sequences]
        sources = [s.blocks.copy_source for s in self.sequences if s.blocks.copy_source is not None]
        held = {block_id for table in tables for block_id in table} | set(sources)
        size = self.cache.block_size
        for sequence in self.sequences:
            assert len(sequence.blocks.block_table) * size >= sequence.num_computed
            assert len(set(sequence.blocks.block_table)) == len(sequence.blocks.block_table)
            if sequence.blocks.block_table:
                self._check_own(sequence)
        if isinstance(self.cache, KVCacheManager):
            assert stats.used == len(held)
            check_pool(self.cache.pool, [*tables, *([source] for source in sources)])
        elif isinstance(self.cache, RadixCache):
            if not self.step:  # within one, the tree's slots for what is computed again are held, too
                assert stats.used == len(held)
            check_tree(self.cache.tree)

    def _check_own(self, sequence: Tracked) -> None:
        """`sharings` stands still only where nobody has to be asked again."""
        num_held, num_own = len(sequence.blocks.block_table), self.cache.num_own(sequence.blocks)
        assert 0 <= num_own <= num_held
        situation = sequence, self.cache.sharings, num_held
        assert self.owned.setdefault(situation, num_own) == num_own

    def state(self) -> tuple[Any, ...]:
        tables = [list(sequence.blocks.block_table) for sequence in self.sequences]
        return tables, self.cache.stats(), self.cache.num_free, [self.found(s) for s in self.sequences]

    def found(self, sequence: Tracked) -> tuple[int, ...]:
        return self.cache.match(sequence.blocks).block_ids

    def _begun(self, token_ids: array[int], salt: str, pick: int) -> SequenceBlocks:
        return self.cache.begin(token_ids, salt=salt, looks_up=pick != 6)

    def _twin(self, parent: Tracked, num_tokens: int) -> SequenceBlocks:
        return self.cache.begin(parent.blocks.token_ids[:num_tokens], salt=parent.salt)

    def _did_refuse(self, why: str) -> None:
        self.answers.append(why)

    def _did_schedule(self, sequence: Tracked, hit_ids: Sequence[int], first: int, num_tokens: int) -> None:
        self.answers.append((first, num_tokens))


VERBS = [
    *["begin"] * 5, *["admit"] * 6, *["grow"] * 8, *["commit"] * 5, *["release"] * 4, *["fork"] * 2,
    "reserve", "look", "abort", "clear",
]  # fmt: skip


def play_laws(discipline: CacheDiscipline, num_tokens: int, max_examples: int) -> Counter[str]:
    count: Counter[str] = Counter()

    @settings(max_examples=max_examples)
    @given(acts=acts(VERBS))
    def play(acts: list[Act]) -> None:
        driver = Driver(make(discipline, num_tokens, 2))
        for act in acts:
            driver.play(*act)
        count.update(driver.count)

    play()
    return count


@pytest.mark.parametrize("num_tokens", [12, 28])
@pytest.mark.parametrize("discipline", CacheDiscipline)
def test_laws(discipline: CacheDiscipline, num_tokens: int) -> None:
    """Pools small enough to evict all the time, and large enough to compute things twice."""
    count = play_laws(discipline, num_tokens, 40)
    assert count["hit tokens"] > 0
    assert count["forks"] > 0
    assert (count["moved"] > 0) == (discipline is not CacheDiscipline.APPEND_ONLY)


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_tokens", [6, 48])
@pytest.mark.parametrize("discipline", CacheDiscipline)
def test_laws_long(discipline: CacheDiscipline, num_tokens: int) -> None:
    """Smaller and larger ones."""
    count = play_laws(discipline, num_tokens, 200)
    assert all(count[name] > 0 for name in ("hit tokens", "awaited"))


# -- block LRU evicts the leaves that the tree would ------------------------------------------------


def play_beside(acts: list[Act], num_tokens: int) -> Counter[str]:
    """Blocks of one token, merged when they fill, and the tree: side by side through one history."""
    blocks, tree = (
        Driver(make(discipline, num_tokens, 1), one_at_a_time=True)
        for discipline in (CacheDiscipline.MERGE_ON_FILL, CacheDiscipline.RADIX_TREE)
    )
    for act in acts:
        blocks.play(*act)
        tree.play(*act)
        assert blocks.answers == tree.answers
        assert blocks.cache.stats() == tree.cache.stats()
        for ours, theirs in zip(blocks.sequences, tree.sequences, strict=True):
            assert len(blocks.found(ours)) == len(tree.found(theirs)), (
                "one has evicted what the other has not"
            )
            if ours.blocks.block_table and not blocks.step:
                assert blocks.cache.num_own(ours.blocks) == tree.cache.num_own(theirs.blocks)
    return blocks.count


# Hits are admitted at once: whether an old one is stale depends on which blocks were given out since.
# Nor with room that holds nothing yet: given back, it is the last of the blocks to be used again.
STEADY = [verb for verb in VERBS if verb not in ("commit", "abort", "look", "reserve")]


@pytest.mark.parametrize("num_tokens", [12, 24])
def test_blocks_of_one_token_are_the_tree(num_tokens: int) -> None:
    """Same hits, same refusals, same evictions, whatever runs, forks, grows and ends in whatever order, as
    long as blocks have one token, are merged when they fill, and each step is one sequence's and succeeds."""
    count: Counter[str] = Counter()

    @settings(max_examples=30)
    @given(acts=acts(STEADY))
    def play(acts: list[Act]) -> None:
        count.update(play_beside(acts, num_tokens))

    play()
    assert all(count[name] > 0 for name in ("hit tokens", "moved", "forks"))


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_tokens", [5, 40])
def test_blocks_of_one_token_are_the_tree_long(num_tokens: int) -> None:
    @settings(max_examples=60)
    @given(acts=acts(STEADY))
    def play(acts: list[Act]) -> None:
        play_beside(acts, num_tokens)

    play()


ROOMY = 240  # tokens, a multiple of every block size: more than any history below computes


def order_of_eviction(discipline: CacheDiscipline, history: list[Act], block_size: int) -> list[Any]:
    """Which prefixes of whole blocks leave, in that order, when everything is idle and memory runs out."""
    driver = Driver(make(discipline, ROOMY, block_size), one_at_a_time=True)
    prefixes: dict[tuple[str, tuple[int, ...]], SequenceBlocks] = {}
    for verb, pick, amount, is_so in history:
        # Whole prompts: a chunk's end would depend on the hit, so on the discipline.
        driver.play(verb, pick, amount, is_so and verb != "admit")
        for sequence in driver.sequences:
            tokens = tuple(sequence.blocks.token_ids[: sequence.num_computed])
            for last in range(block_size, len(tokens) + 1, block_size):
                prefix = (sequence.salt, tokens[:last])
                if prefix not in prefixes:  # one token more, because a hit leaves one to compute
                    token_ids = pack_tokens([*tokens[:last], 2])
                    prefixes[prefix] = driver.cache.begin(token_ids, salt=sequence.salt)
    for sequence in driver.sequences:
        driver.cache.release(sequence.blocks)
    cache, left, gone = driver.cache, set(prefixes), []
    filler = cache.begin(pack_tokens([3] * ROOMY), looks_up=False)
    for num_tokens in range(1, ROOMY + 1):
        if num_tokens == 1:
            cache.admit(filler, cache.match(filler), 1)
        else:
            cache.grow(filler, num_tokens)
        cache.commit_step()
        followed = {
            (salt, tokens[:-block_size]) for salt, tokens in left
        }  # cannot go before what follows them
        lost = {
            prefix for prefix in left - followed if cache.match(prefixes[prefix]).num_tokens < len(prefix[1])
        }
        assert len(lost) <= 1, "one block took two prefixes with it"
        gone += lost
        left -= lost
        if not left:
            return gone
    raise AssertionError("something was never evicted")


BUILDING = ["begin", "begin", "admit", "admit", "admit", "grow", "grow", "grow", "fork", "release"]


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("discipline", PAGED)
def test_prefixes_leave_in_the_trees_order(discipline: CacheDiscipline, block_size: int) -> None:
    """Whatever the block size, and with every duplicate kept: a history without eviction, and then nothing
    but eviction. What differs under pressure is how much memory partial blocks and duplicates take, not
    which prefix goes next."""

    @settings(max_examples=10)
    @given(history=acts(BUILDING, most=60))
    def play(history: list[Act]) -> None:
        expected = order_of_eviction(CacheDiscipline.RADIX_TREE, history, 1)
        whole = [prefix for prefix in expected if len(prefix[1]) % block_size == 0]
        assert order_of_eviction(discipline, history, block_size) == whole

    play()
