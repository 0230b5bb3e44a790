"""One behaviour suite for every cache discipline, and what they have in common.

Acts come as a scheduler's would. Beside each cache runs the K/V memory that a model would have written: every
slot holds the whole prefix it was computed from, so a hit that shows anything else is seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import BlockHasher
from cache.disciplines import PAGED, CacheDiscipline, paged_cache
from cache.errors import BlocksAwaited, BlocksInUse, NoFreeBlocks, StaleHit
from cache.kv_cache_manager import KVCacheManager, PrefixHit, SequenceBlocks
from cache.prefix_cache import PrefixCache
from cache.radix_cache import RadixCache
from cache.types import pack_tokens
from tests.fakes.cache import a_fingerprint, check_pool
from tests.fakes.radix import check_tree

MAX_SEQUENCES = 5


def make(discipline: CacheDiscipline, num_tokens: int, block_size: int) -> PrefixCache:
    """block_size: of those that have blocks."""
    hasher = BlockHasher(a_fingerprint(block_size=block_size))
    if discipline is CacheDiscipline.RADIX_TREE:
        return RadixCache(num_tokens, hasher)
    return paged_cache(discipline, num_tokens // block_size, hasher, block_size=block_size)


@dataclass(eq=False)
class Tracked:
    """A sequence and what the scheduler would know of it."""

    blocks: SequenceBlocks
    salt: str
    num_computed: int = 0  # tokens with keys and values, this step's included


@dataclass
class Driver:
    """Plays acts against one cache and checks every law after each.

    one_at_a_time: each step is one sequence's, committed at once.
    """

    cache: PrefixCache
    one_at_a_time: bool = False
    sequences: list[Tracked] = field(default_factory=list)
    step: dict[Tracked, int] = field(default_factory=dict)  # sequence -> its first token of this step
    slots: dict[int, Any] = field(default_factory=dict)  # what each was computed from
    old_hits: dict[Tracked, PrefixHit] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)  # what the cache said, act by act
    count: Counter[str] = field(default_factory=Counter)

    def play(self, verb: str, pick: int, amount: int, is_so: bool) -> None:
        getattr(self, verb)(pick, amount, is_so)
        if self.one_at_a_time and self.step:
            self.commit(0, 0, False)
        self.check_laws()

    # -- what a scheduler does --------------------------------------------------------------------

    def begin(self, pick: int, amount: int, is_so: bool) -> None:
        """Up to 11 tokens, all equal or with one unlike the others: most prompts share a prefix."""
        if len(self.sequences) == MAX_SEQUENCES:
            return
        token_ids = pack_tokens([0] * (1 + amount % 11))
        if is_so:
            token_ids[pick % len(token_ids)] = 1
        salt = "s" if pick == 7 else ""
        blocks = self.cache.begin(token_ids, salt=salt, looks_up=pick != 6)
        self.sequences.append(Tracked(blocks, salt))

    def look(self, pick: int, amount: int, is_so: bool) -> None:
        """Look up now, admit later: the hit may be evicted in between."""
        if (sequence := _pick(self._idle(), pick)) is not None:
            self.old_hits[sequence] = self._match(sequence)

    def admit(self, pick: int, amount: int, is_so: bool) -> None:
        if (sequence := _pick(self._idle(), pick)) is None:
            return
        old_hit = self.old_hits.pop(sequence, None)
        hit = old_hit or self._match(sequence)
        left = len(sequence.blocks.token_ids) - hit.num_tokens
        num_tokens = 1 + amount % left if is_so else left
        needed = self.cache.blocks_needed(sequence.blocks, hit, num_tokens)
        before, free = self.state(), self.cache.num_free
        try:
            self.cache.admit(sequence.blocks, hit, num_tokens)
        except NoFreeBlocks:
            assert self.state() == before
            assert old_hit is not None or needed > free
            self.answers.append("no room")
            return
        except StaleHit:
            assert self.state() == before
            assert old_hit is not None
            assert self._match(sequence).block_ids[: len(hit.block_ids)] != hit.block_ids
            self.count["stale"] += 1
            self.answers.append("stale")
            return
        assert old_hit is not None or needed <= free
        self.count["hit tokens"] += hit.num_tokens
        self._schedule(sequence, hit.num_tokens, hit.num_tokens + num_tokens)

    def grow(self, pick: int, amount: int, is_so: bool) -> None:
        """A sampled token, or a further chunk of the prompt."""
        if (sequence := _pick(self._running(), pick)) is None:
            return
        token_ids = sequence.blocks.token_ids
        if sequence.num_computed == len(token_ids):
            token_ids.append(is_so)
        num_tokens = min(sequence.num_computed + 1 + amount, len(token_ids))
        before = self.state()
        try:
            self.cache.grow(sequence.blocks, num_tokens)
        except NoFreeBlocks:
            assert self.state() == before
            self.answers.append("no room")
            return
        self._schedule(sequence, sequence.num_computed, num_tokens)

    def fork(self, pick: int, amount: int, is_so: bool) -> None:
        """One begins with what another has computed, and computes a token of its own."""
        parents = [sequence for sequence in self._running() if sequence.num_computed > 1]
        if self.step or (parent := _pick(parents, pick)) is None or len(self.sequences) == MAX_SEQUENCES:
            return
        num_tokens = 1 + amount % (parent.num_computed - 1)
        child = Tracked(
            self.cache.begin(parent.blocks.token_ids[: num_tokens + 1], salt=parent.salt), parent.salt
        )
        before, free = self.state(), self.cache.num_free
        try:
            self.cache.fork(parent.blocks, child.blocks, num_tokens)
        except NoFreeBlocks:
            assert self.state() == before
            assert free == 0
            return
        assert self.cache.num_free == free - 1
        self.sequences.append(child)
        self.cache.grow(child.blocks, num_tokens + 1)
        self._schedule(child, num_tokens, num_tokens + 1)
        self.count["forks"] += 1

    def release(self, pick: int, amount: int, is_so: bool) -> None:
        """Preempted or finished, inside a step or between two."""
        if (sequence := _pick(self.sequences, pick)) is None:
            return
        before, is_awaited = self.state(), self.cache.is_awaited(sequence.blocks)
        try:
            self.cache.release(sequence.blocks)
        except BlocksAwaited:
            assert is_awaited
            assert self.state() == before
            assert sequence in self.step
            self.count["awaited"] += 1
            return
        assert not is_awaited
        self.cache.release(sequence.blocks)  # idempotent
        assert not sequence.blocks.block_table
        self.step.pop(sequence, None)
        sequence.num_computed = 0
        if is_so:
            self.sequences.remove(sequence)
            self.old_hits.pop(sequence, None)

    def commit(self, pick: int, amount: int, is_so: bool) -> None:
        """Forks copy, every sequence writes, and then, the step committed, reads what its table shows."""
        size, written = self.cache.block_size, set[int]()
        for child, first in self.step.items():
            if (source := child.blocks.copy_source) is not None:
                target = child.blocks.block_table[first // size]
                for offset in range(first % size):
                    self.slots[target * size + offset] = self.slots[source * size + offset]
        for sequence, first in self.step.items():
            for position in range(first, sequence.num_computed):
                slot = self._slot(sequence, position)
                assert slot not in written, "two sequences of a step write into one slot"
                written.add(slot)
                self.slots[slot] = self._computed_from(sequence, position)
        before = {sequence: list(sequence.blocks.block_table) for sequence in self.step}
        self.step.clear()
        self.cache.commit_step()
        for sequence, table in before.items():
            self.count["moved"] += sequence.blocks.block_table != table
        self.read()

    def read(self) -> None:
        for sequence in self.sequences:
            for position in range(sequence.num_computed):
                held = self.slots[self._slot(sequence, position)]
                assert held == self._computed_from(sequence, position), "another prefix's keys and values"

    def abort(self, pick: int, amount: int, is_so: bool) -> None:
        """The forward raised halfway: what it wrote is garbage, and its sequences start again."""
        for sequence, first in self.step.items():
            for position in range(first, sequence.num_computed):
                self.slots[self._slot(sequence, position)] = "garbage"
        self.cache.abort_step()
        for sequence in self.step:
            self.cache.release(sequence.blocks)
            sequence.num_computed = 0
        self.step.clear()

    def clear(self, pick: int, amount: int, is_so: bool) -> None:
        before = self.state()
        if any(s.blocks.block_table for s in self.sequences):
            with pytest.raises(BlocksInUse):
                self.cache.clear()
            assert self.state() == before
        elif pick == 0:
            self.cache.clear()
            assert self.cache.stats().cached == 0

    # -- laws -------------------------------------------------------------------------------------

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
                assert 0 <= self.cache.num_own(sequence.blocks) <= len(sequence.blocks.block_table)
        if isinstance(self.cache, KVCacheManager):
            assert stats.used == len(held)
            check_pool(self.cache.pool, [*tables, *([source] for source in sources)])
        elif isinstance(self.cache, RadixCache):
            if not self.step:  # within one, the tree's slots for what is computed again are held, too
                assert stats.used == len(held)
            check_tree(self.cache.tree)

    def state(self) -> tuple[Any, ...]:
        """Everything that a refused call must leave as it was."""
        tables = [list(sequence.blocks.block_table) for sequence in self.sequences]
        return tables, self.cache.stats(), self.cache.num_free, [self.found(s) for s in self.sequences]

    def found(self, sequence: Tracked) -> tuple[int, ...]:
        return self.cache.match(sequence.blocks).block_ids

    # -- shared by the acts -----------------------------------------------------------------------

    def _schedule(self, sequence: Tracked, first: int, num_tokens: int) -> None:
        self.step[sequence] = first
        sequence.num_computed = num_tokens
        self.answers.append((first, num_tokens))

    def _match(self, sequence: Tracked) -> PrefixHit:
        hit = self.cache.match(sequence.blocks)
        assert hit.num_tokens == len(hit.block_ids) * self.cache.block_size < len(sequence.blocks.token_ids)
        assert sequence.blocks.looks_up or not hit.num_tokens
        return hit

    def _idle(self) -> list[Tracked]:
        return [sequence for sequence in self.sequences if not sequence.blocks.block_table]

    def _running(self) -> list[Tracked]:
        return [s for s in self.sequences if s.blocks.block_table and s not in self.step]

    def _slot(self, sequence: Tracked, position: int) -> int:
        size = self.cache.block_size
        return sequence.blocks.block_table[position // size] * size + position % size

    def _computed_from(self, sequence: Tracked, position: int) -> tuple[Any, ...]:
        return sequence.salt, tuple(sequence.blocks.token_ids[: position + 1])


def _pick(items: list[Any], pick: int) -> Any | None:
    return items[pick % len(items)] if items else None


VERBS = [
    *["begin"] * 5, *["admit"] * 6, *["grow"] * 8, *["commit"] * 5, *["release"] * 4, *["fork"] * 2,
    "look", "abort", "clear",
]  # fmt: skip
Act = tuple[str, int, int, bool]


def acts(verbs: list[str], *, most: int = 150) -> st.SearchStrategy[list[Act]]:
    act = st.tuples(st.sampled_from(verbs), st.integers(0, 7), st.integers(0, 10), st.booleans())
    return st.lists(act, min_size=40, max_size=most)


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
    count = play_laws(discipline, num_tokens, 60)
    assert count["hit tokens"] > 0
    assert count["forks"] > 0
    assert (count["moved"] > 0) == (discipline is not CacheDiscipline.APPEND_ONLY)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_tokens", [6, 12, 28, 48])
@pytest.mark.parametrize("discipline", CacheDiscipline)
def test_laws_long(discipline: CacheDiscipline, num_tokens: int) -> None:
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
STEADY = [verb for verb in VERBS if verb not in ("commit", "abort", "look")]


@pytest.mark.parametrize("num_tokens", [12, 24])
def test_blocks_of_one_token_are_the_tree(num_tokens: int) -> None:
    """Same hits, same refusals, same evictions, whatever runs, forks, grows and ends in whatever order, as
    long as blocks have one token, are merged when they fill, and each step is one sequence's and succeeds."""
    count: Counter[str] = Counter()

    @settings(max_examples=50)
    @given(acts=acts(STEADY))
    def play(acts: list[Act]) -> None:
        count.update(play_beside(acts, num_tokens))

    play()
    assert all(count[name] > 0 for name in ("hit tokens", "moved", "forks"))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_tokens", [5, 12, 24, 40])
def test_blocks_of_one_token_are_the_tree_long(num_tokens: int) -> None:
    @settings(max_examples=250)
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
