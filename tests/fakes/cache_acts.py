"""A scheduler's acts against a prefix cache, and the K/V memory that a model would have written.

Every slot of that memory holds the whole prefix it was computed from, so a hit is wrong exactly when it shows
anything else. An act is (verb, pick, amount, is_so); what a verb makes of the last three is written in its
method. One list of acts is an example: unlike a rule-based machine, whose examples each leave most rules out,
nearly all of them come to hits, duplicates and evictions.

Knows what any cache promises a scheduler; the suites add what is promised of theirs, in `check_laws` and the
methods named `_did_...`, which are told of what has been done.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from cache.errors import BlocksAwaited, BlocksInUse, NoFreeBlocks, StaleHit
from cache.kv_cache_manager import PrefixHit, SequenceBlocks
from cache.prefix_cache import PrefixCache
from cache.types import pack_tokens

MAX_SEQUENCES = 5
MOST_RUNS = 4  # of random examples some lack what others have

Act = tuple[str, int, int, bool]


def acts(verbs: Sequence[str], *, most: int = 150) -> st.SearchStrategy[list[Act]]:
    """verbs: each as often as it is to come."""
    act = st.tuples(st.sampled_from(verbs), st.integers(0, 7), st.integers(0, 10), st.booleans())
    return st.lists(act, min_size=40, max_size=most)


def seen(wanted: Sequence[str], run: Callable[[int], Counter[str]]) -> Counter[str]:
    """What happened how often, in as many runs of examples, numbered from 0, as it takes to see all that is
    wanted; up to `MOST_RUNS`. Raises AssertionError if that is not enough."""
    count: Counter[str] = Counter()
    for number in range(MOST_RUNS):
        count += run(number)
        if all(count[name] > 0 for name in wanted):
            return count
    raise AssertionError(f"not all of {wanted} in {count}")


@dataclass(eq=False)
class Tracked:
    """A sequence and what the scheduler would know of it."""

    blocks: SequenceBlocks
    salt: str
    num_computed: int = 0  # tokens with keys and values, this step's included


class CacheActs:
    """Plays acts against one cache and checks every law after each. `sequences`, `slots` and `count`: what
    there is, what memory holds, and what happened how often."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        one_at_a_time: bool = False,
        most_children: int = 1,
        most_with_forks: float = math.inf,
    ) -> None:
        """one_at_a_time: each step is one sequence's, committed at once. most_children: of one fork.
        most_with_forks: sequences there may be before one; what begins by itself is bounded in any case."""
        self.cache = cache
        self.one_at_a_time = one_at_a_time
        self._most_children = most_children
        self._most_with_forks = most_with_forks
        self.sequences: list[Tracked] = []
        self.step: dict[Tracked, int] = {}  # sequence -> its first token of this step
        self.slots: dict[int, Any] = {}  # what each was computed from
        self.old_hits: dict[Tracked, PrefixHit] = {}
        self.count: Counter[str] = Counter()

    def play(self, verb: str, pick: int, amount: int, is_so: bool) -> None:
        getattr(self, verb)(pick, amount, is_so)
        if self.one_at_a_time and self.step:
            self.commit(0, 0, False)
        self.check_laws()

    # -- what a suite says of its cache -----------------------------------------------------------

    def check_laws(self) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        """Everything that a refused call must leave as it was."""
        raise NotImplementedError

    def _begun(self, token_ids: array[int], salt: str, pick: int) -> SequenceBlocks:
        raise NotImplementedError

    def _twin(self, parent: Tracked, num_tokens: int) -> SequenceBlocks:
        """Of its first tokens, and nothing else of it."""
        raise NotImplementedError

    def _computed_from(self, sequence: Tracked, position: int) -> tuple[Any, ...]:
        """What a slot holds that was computed for this position."""
        return sequence.salt, tuple(sequence.blocks.token_ids[: position + 1])

    def _is_held(self) -> bool:
        """Blocks are in use, so nothing may be cleared."""
        return any(sequence.blocks.block_table for sequence in self.sequences)

    def _is_another(self, now: PrefixHit, hit: PrefixHit) -> bool:
        """What is found now is not what was found before."""
        return now.block_ids[: len(hit.block_ids)] != hit.block_ids

    def _did_refuse(self, why: str) -> None:
        """A call found no room, or its hit stale."""

    def _did_admit(self, hit: PrefixHit, *, needed: int, free: int) -> None:
        """With a hit that was just looked up. needed: blocks, as asked before; free: there were."""
        assert needed <= free

    def _did_schedule(self, sequence: Tracked, hit_ids: Sequence[int], first: int, num_tokens: int) -> None:
        """Its tokens [first, num_tokens) are in the step."""

    def _did_reserve(self, sequence: Tracked, num_tokens: int) -> None:
        """It has room for so many of its tokens."""

    def _did_fork(self, parent: Tracked, child: SequenceBlocks, num_tokens: int) -> None: ...

    def _was_awaited(self, sequence: Tracked) -> None:
        """It was not released: somebody waits for what it computes."""

    def _did_release(self, sequence: Tracked) -> None: ...

    def _did_commit(self) -> None: ...

    def _did_abort(self) -> None:
        """Before the step's sequences are released."""

    def _did_clear(self) -> None: ...

    # -- what a scheduler does --------------------------------------------------------------------

    def begin(self, pick: int, amount: int, is_so: bool) -> None:
        """A prompt of up to 11 tokens, all equal or with one unlike the others: most share a prefix."""
        if len(self.sequences) == MAX_SEQUENCES:
            return
        token_ids = pack_tokens([0] * (1 + amount % 11))
        if is_so:
            token_ids[pick % len(token_ids)] = 1
        salt = "s" if pick == 7 else ""
        self.sequences.append(Tracked(self._begun(token_ids, salt, pick), salt))

    def look(self, pick: int, amount: int, is_so: bool) -> None:
        """Look up now, admit later: the hit may be evicted in between."""
        if (sequence := picked(self._idle(), pick)) is not None:
            before = self.state()
            self.old_hits[sequence] = self._match(sequence)
            assert self.state() == before

    def admit(self, pick: int, amount: int, is_so: bool) -> None:
        """The whole rest of the prompt, or a chunk of it; with the hit from `look` if there is one."""
        if (sequence := picked(self._idle(), pick)) is None:
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
            self._did_refuse("no room")
            return
        except StaleHit:
            assert self.state() == before
            assert old_hit is not None
            assert self._is_another(self._match(sequence), hit)
            self.count["stale"] += 1
            self._did_refuse("stale")
            return
        if old_hit is None:
            self._did_admit(hit, needed=needed, free=free)
        self.count["hit tokens"] += hit.num_tokens
        self._schedule(sequence, hit.num_tokens, hit.num_tokens + num_tokens, hit.block_ids)

    def grow(self, pick: int, amount: int, is_so: bool) -> None:
        """A sampled token, or a further chunk of the prompt."""
        if (sequence := picked(self._running(), pick)) is None:
            return
        token_ids = sequence.blocks.token_ids
        if sequence.num_computed == len(token_ids):
            token_ids.append(is_so)
        num_tokens = min(sequence.num_computed + 1 + amount, len(token_ids))
        if self._has_room(self.cache.grow, sequence, num_tokens):
            self._schedule(sequence, sequence.num_computed, num_tokens)

    def reserve(self, pick: int, amount: int, is_so: bool) -> None:
        """Room for what a later step computes, or nobody ever."""
        if (sequence := picked(self._running(), pick)) is None:
            return
        num_tokens = min(sequence.num_computed + amount, len(sequence.blocks.token_ids))
        held, free = len(sequence.blocks.block_table), self.cache.num_free
        if not self._has_room(self.cache.reserve, sequence, num_tokens):
            return
        taken = max(0, self.cache.new_blocks(num_tokens) - held)
        assert len(sequence.blocks.block_table) == held + taken
        assert self.cache.num_free == free - taken
        self._did_reserve(sequence, num_tokens)

    def _has_room(
        self, take: Callable[[SequenceBlocks, int], None], sequence: Tracked, num_tokens: int
    ) -> bool:
        """Whether it could take so many; if not, nothing has changed."""
        before = self.state()
        try:
            take(sequence.blocks, num_tokens)
        except NoFreeBlocks:
            assert self.state() == before
            self._did_refuse("no room")
            return False
        return True

    def fork(self, pick: int, amount: int, is_so: bool) -> None:
        """Some begin with what another has computed, and compute a token of their own."""
        parents = [sequence for sequence in self._running() if sequence.num_computed > 1]
        if self.step or (parent := picked(parents, pick)) is None:
            return
        if len(self.sequences) >= self._most_with_forks:
            return
        num_tokens = 1 + amount % (parent.num_computed - 1)
        children = []
        for _ in range(1 + amount % self._most_children):
            blocks = self._twin(parent, num_tokens + 1)
            before, free = self.state(), self.cache.num_free
            try:
                self.cache.fork(parent.blocks, blocks, num_tokens)
            except NoFreeBlocks:
                assert self.state() == before
                assert free == 0
                break
            assert self.cache.num_free == free - 1
            self._did_fork(parent, blocks, num_tokens)
            children.append(Tracked(blocks, parent.salt, num_tokens))
            self.sequences.append(children[-1])
        for child in children:
            self.cache.grow(child.blocks, num_tokens + 1)
            self._schedule(child, num_tokens, num_tokens + 1)
            self.count["forks"] += 1

    def release(self, pick: int, amount: int, is_so: bool) -> None:
        """Preempted or finished, inside a step or between two."""
        if (sequence := picked(self.sequences, pick)) is None:
            return
        before, is_awaited = self.state(), self.cache.is_awaited(sequence.blocks)
        try:
            self.cache.release(sequence.blocks)
        except BlocksAwaited:
            assert is_awaited
            assert self.state() == before
            assert sequence in self.step
            self.count["awaited"] += 1
            self._was_awaited(sequence)
            return
        assert not is_awaited
        self._did_release(sequence)
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
        self._did_commit()
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
        self._did_abort()
        for sequence in self.step:
            self.cache.release(sequence.blocks)
            self._did_release(sequence)
            sequence.num_computed = 0
        self.step.clear()

    def clear(self, pick: int, amount: int, is_so: bool) -> None:
        if self._is_held():
            before = self.state()
            with pytest.raises(BlocksInUse):
                self.cache.clear()
            assert self.state() == before
        elif pick == 0:
            self.cache.clear()
            self._did_clear()
            assert self.cache.stats().cached == 0

    # -- shared by the acts -----------------------------------------------------------------------

    def _schedule(self, sequence: Tracked, first: int, num_tokens: int, hit_ids: Sequence[int] = ()) -> None:
        self.step[sequence] = first
        sequence.num_computed = num_tokens
        self._did_schedule(sequence, hit_ids, first, num_tokens)

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


_Item = TypeVar("_Item")


def picked(items: Sequence[_Item], pick: int) -> _Item | None:
    return items[pick % len(items)] if items else None
