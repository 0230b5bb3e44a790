"""A cache whose calls are timed one by one. Knows calls; knows no discipline.

CPU time of the thread, so that neighbours on the machine do not count; what reading the clock takes is
measured and taken off. Where reading takes much longer than the call, few
calls are timed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from statistics import mean, median
from typing import ParamSpec, TypeVar

from cache.kv_cache_manager import CacheStats, PrefixHit, SequenceBlocks
from cache.prefix_cache import PrefixCache

VERBS = ("match", "admit", "grow", "release", "commit")

# One in so many is timed. A prime: of block sizes none is a multiple, so fills come in their share.
EVERY = {"grow": 13, "commit": 13}

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TimedCache:
    """A `PrefixCache` that passes every call on."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._ns = {verb: array("q") for verb in VERBS}
        self._num_calls = dict.fromkeys(VERBS, 0)
        self.block_size = cache.block_size
        self.prefix_caching = cache.prefix_caching
        # Not timed: cheap, or asked by the scheduler's own accounts in every step alike.
        self.begin = cache.begin
        self.allow_hits = cache.allow_hits
        self.new_blocks = cache.new_blocks
        self.blocks_needed = cache.blocks_needed
        self.num_own = cache.num_own
        self.is_awaited = cache.is_awaited
        self.fork = cache.fork
        self.abort_step = cache.abort_step
        self.clear = cache.clear

    @property
    def num_free(self) -> int:
        return self._cache.num_free

    @property
    def sharings(self) -> int:
        return self._cache.sharings

    def stats(self) -> CacheStats:
        return self._cache.stats()

    def match(self, sequence: SequenceBlocks) -> PrefixHit:
        return self._timed("match", self._cache.match, sequence)

    def admit(self, sequence: SequenceBlocks, hit: PrefixHit, num_tokens: int) -> None:
        self._timed("admit", self._cache.admit, sequence, hit, num_tokens)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        self._timed("grow", self._cache.grow, sequence, num_tokens)

    def reserve(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        self._cache.reserve(sequence, num_tokens)

    def release(self, sequence: SequenceBlocks) -> None:
        self._timed("release", self._cache.release, sequence)

    def swap_out(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        return self._cache.swap_out(sequence, num_tokens)

    def commit_step(self) -> None:
        self._timed("commit", self._cache.commit_step)

    def median_us(self, verb: str) -> float:
        """Of one call. 0 if there was none."""
        return max(0.0, median(self._ns[verb]) - _CLOCK_NS) / 1000 if self._ns[verb] else 0.0

    def total_us(self) -> float:
        """Of all calls: the mean of those that were timed, times as many as there were."""
        return sum(
            self._num_calls[verb] * max(0.0, mean(spent) - _CLOCK_NS) / 1000
            for verb, spent in self._ns.items()
            if spent
        )

    def _timed(self, verb: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._num_calls[verb] += 1
        if self._num_calls[verb] % EVERY.get(verb, 1):
            return call(*args, **kwargs)
        began_ns = time.thread_time_ns()
        try:
            return call(*args, **kwargs)
        finally:
            self._ns[verb].append(time.thread_time_ns() - began_ns)


def _clock_ns() -> float:
    spent = []
    for _ in range(2000):
        began_ns = time.thread_time_ns()
        spent.append(time.thread_time_ns() - began_ns)
    return median(spent)


_CLOCK_NS = _clock_ns()
