"""Which prefixes are used so often that one more copy of them is an investment, not waste.

Counts uses of every `stride`th block of routed prompts over a sliding window of two generations: a
system prompt is thousands of tokens, so its length to within `STRIDE_TOKENS` is enough; a prompt of
512 blocks of 16 tokens costs 64 counts. A use of a block is a use of its parents, so counts fall along
a chain. Twins are one use: the same prompt asked sixty times has a place already, and it is prompts that go
on differently which a copy of their common prefix serves.
A conversation uses its own history again and again, and goes on where it ended. A prefix is *shared* where
several prompts went on after it, each with something new.

Knows 64-bit hints; knows neither replicas nor tokens. Owner: the router's event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cache.types import HashHint
from router.placement.use_counts import use_counts

STRIDE_TOKENS = 128  # from one block that is counted to the next, if blocks are not longer


class HotPrefixes:
    def __init__(self, block_size: int, *, window_s: float = 60.0, max_entries: int = 1 << 16) -> None:
        """window_s: how long a use counts, between one and two times this; max_entries: per generation."""
        self._stride = max(1, STRIDE_TOKENS // block_size)
        self._window_s = window_s
        self._max_entries = max_entries
        self._uses = use_counts(max_entries)
        # Of the same blocks, how many prompts went on after them with what nobody had had.
        self._forks: Counter[HashHint] = Counter()
        self._previous_forks: Counter[HashHint] = Counter()
        self._turned_at = float("-inf")
        # Prompts counted, by last block and length: many end within a block after the same ones.
        self._prompts: set[tuple[HashHint, int]] = set()
        self._previous_prompts: set[tuple[HashHint, int]] = set()

    def record(self, hints: Sequence[HashHint], num_tokens: int, now: float) -> None:
        """A prompt of so many tokens, and of these full blocks, was routed. O(blocks / stride)."""
        is_full = self._uses.num_new >= self._max_entries or len(self._prompts) >= self._max_entries
        if now - self._turned_at >= self._window_s or is_full:
            self._turn(now)
        if not hints:
            return
        prompt = (hints[-1], num_tokens)
        if prompt in self._prompts or prompt in self._previous_prompts:
            return
        self._prompts.add(prompt)
        known = self.num_hot_blocks(hints, 1.0)
        if known:
            self._forks[hints[known - 1]] += 1
        self._uses.add(hints, self._stride)

    def num_hot_blocks(self, hints: Sequence[HashHint], min_uses: float) -> int:
        """Leading blocks used at least that often, rounded down to the stride. O(log(those))."""
        return self._uses.leading(hints, self._stride, min_uses)

    def num_shared_blocks(self, hints: Sequence[HashHint]) -> int:
        """Leading blocks after which two prompts or more went on with something new, this one counted if it
        does; rounded down to the stride. O(blocks / stride)."""
        forks, previous, stride = self._forks.get, self._previous_forks.get, self._stride
        known = self.num_hot_blocks(hints, 1.0)
        for count in range(known, 0, -stride):
            hint = hints[count - 1]
            if forks(hint, 0) + previous(hint, 0) + (count == known) >= 2:
                return count
        return 0

    def num_used_after(self, hints: Sequence[HashHint], num_blocks: int) -> int:
        """Blocks behind the first so many that some prompt had, as far as they were counted. Mostly O(1)."""
        stride = self._stride
        counted = (num_blocks // stride + 1) * stride  # blocks up to the next one that is counted
        # Counts fall along a chain: without that one there is none behind it.
        if counted > len(hints) or not self.num_uses(hints, counted):
            return 0
        return self.num_hot_blocks(hints, 1.0) - num_blocks

    def num_uses(self, hints: Sequence[HashHint], num_blocks: int) -> int:
        """How often the first so many blocks were used, a multiple of the stride. O(1)."""
        return self._uses.total(hints[num_blocks - 1 : num_blocks])

    def sum_of_uses(self, hints: Iterable[HashHint]) -> int:
        """How often blocks were used, all together; any blocks, as far as can be told from those counted."""
        return self._stride * self._uses.total(hints)

    @property
    def num_entries(self) -> int:
        return self._uses.num_entries

    def _turn(self, now: float) -> None:
        # Both generations turn as a whole, so that counts keep falling along every chain.
        is_stale = now - self._turned_at >= 2 * self._window_s
        self._uses.turn(forget=is_stale)
        self._previous_prompts = set() if is_stale else self._prompts
        self._previous_forks = Counter() if is_stale else self._forks
        self._prompts, self._forks = set(), Counter()
        self._turned_at = now
