"""Hit rate for every cache size at once, from one pass over a trace.

In a least-recently-used cache a block is found exactly if fewer other blocks than the cache holds were used
since its last use: its stack distance (Mattson et al., *Evaluation techniques for storage hierarchies*, IBM
Systems Journal 9(2), 1970). Blocks are used in chains, the head last, as the engine frees them; so along a
chain distances only grow, and the leading blocks within the cache size are the hit.
Blocks that are always used together are counted as one run, which makes 16-token blocks as fast as 512-token
ones. Knows chains of block names; knows neither policies nor engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.simulation.turns import name_contents
from loadtest.workloads.request import Workload


@dataclass(frozen=True, slots=True)
class Use:
    """One request's use of the cache."""

    chain: Sequence[Hashable]  # full blocks of prompt and answer, parent first; equal names, equal prefixes
    num_usable: int  # leading blocks that could be hits: of the prompt, and not its last token's


@dataclass(frozen=True, slots=True, eq=False)
class HitCurve:
    """Hits as a function of cache size."""

    block_tokens: int
    total_tokens: int  # of all prompts
    distances: npt.NDArray[np.int64]  # of every usable block that was used before, in blocks, sorted

    def hit_ratio(self, cache_tokens: float) -> float:
        """Prompt tokens that one cache of that size would hold, over all prompt tokens."""
        found = int(np.searchsorted(self.distances, cache_tokens // self.block_tokens, side="right"))
        return found * self.block_tokens / self.total_tokens

    @property
    def most(self) -> float:
        """With a cache without bound."""
        return len(self.distances) * self.block_tokens / self.total_tokens

    def size_for(self, share: float) -> int:
        """Least cache, in tokens, that reaches that share (0..1] of the most; 0 if nothing is ever reused."""
        if not len(self.distances):
            return 0
        place = max(0, int(np.ceil(share * len(self.distances))) - 1)
        return int(self.distances[place]) * self.block_tokens


def hit_curve(workload: Workload) -> HitCurve:
    """O(runs of blocks used * log requests)."""
    size = workload.block_tokens
    chains = name_contents(workload).blocks
    uses = [
        Use(chain, (request.input_tokens - 1) // size)
        for chain, request in zip(chains, workload.requests, strict=True)
    ]
    distances = np.fromiter(stack_distances(uses), dtype=np.int64)
    distances.sort()
    return HitCurve(size, sum(request.input_tokens for request in workload.requests), distances)


def stack_distances(uses: Sequence[Use]) -> Iterator[int]:
    """For every usable block used before: blocks used since, itself included. In no promised order."""
    num_uses = Counter(block for use in uses for block in use.chain)
    num_runs = sum(sum(1 for _ in _runs(use, num_uses)) for use in uses)
    recency = _Recency(num_runs)
    last_place: dict[Hashable, tuple[int, int]] = {}  # by a run's first block: its place, its blocks
    place = 0
    for use in uses:
        runs = list(_runs(use, num_uses))
        for first, _, num_usable in runs:
            known = last_place.get(first)
            if known is not None and num_usable:
                above = recency.blocks_after(known[0])
                yield from range(above + 1, above + num_usable + 1)
        for first, length, _ in reversed(runs):  # the head last: it is the most recently used
            known = last_place.get(first)
            if known is not None:
                recency.add(known[0], -length)
            recency.add(place, length)
            last_place[first] = place, length
            place += 1


def _runs(use: Use, num_uses: Counter[Hashable]) -> Iterator[tuple[Hashable, int, int]]:
    """(first block, blocks, usable blocks) of each stretch whose blocks are used equally often.

    Whoever uses a block uses all before it, so equally often means always together.
    """
    chain = use.chain
    start = 0
    while start < len(chain):
        end = start + 1
        while end < len(chain) and num_uses[chain[end]] == num_uses[chain[start]]:
            end += 1
        yield chain[start], end - start, min(end, use.num_usable) - start if use.num_usable > start else 0
        start = end


class _Recency:
    """Blocks by place in the order of last use: a Fenwick tree, O(log places) for each call."""

    def __init__(self, num_places: int) -> None:
        self._tree = [0] * (num_places + 1)
        self._total = 0

    def add(self, place: int, blocks: int) -> None:
        self._total += blocks
        tree, index = self._tree, place + 1
        while index < len(tree):
            tree[index] += blocks
            index += index & -index

    def blocks_after(self, place: int) -> int:
        """Blocks at places beyond that one."""
        tree, index, upto = self._tree, place + 1, 0
        while index:
            upto += tree[index]
            index -= index & -index
        return self._total - upto
