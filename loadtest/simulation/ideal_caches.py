"""What an ideal's engines find computed: in one cache that all of them share, or each in its own.

Knows blocks and what engines hold and queue; knows neither time nor where a request should go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from cache.block_pool import BlockPool
from cache.disciplines import DEFAULT, paged_cache
from cache.kv_cache_manager import KVCacheManager
from cache.types import BlockHash
from loadtest.simulation.engine import SimEngine
from loadtest.simulation.pooled_cache import PooledCache
from loadtest.simulation.turns import Turn, TurnHasher, TurnTokens, fingerprint
from replica.scheduling.step_time import attention_pairs


class Need(NamedTuple):
    """What of a prompt is left to compute."""

    tokens: int
    attention: float  # (query, key) pairs


class IdealCaches(Protocol):
    @property
    def by_engine(self) -> Sequence[KVCacheManager]:
        """In order of their index; what `SimEngine` is to be given."""

    def needs(self, turn: Turn, engines: Sequence[SimEngine]) -> list[Need]:
        """What the turn would leave each of these to compute, as things are. Changes nothing."""


class OneCache:
    """One cache of N times the capacity. A block that any engine has computed, or is computing, is there for
    all, at once and for nothing, so placement decides nothing but the waiting.

    What a running sequence holds lies in its engine's own memory, as ever (`pooled_cache.py`).
    """

    def __init__(self, num_engines: int, own_blocks: int, *, block_tokens: int) -> None:
        """own_blocks: of one engine."""
        pool, hasher = BlockPool(num_engines * own_blocks), TurnHasher(fingerprint(block_tokens))
        self.by_engine = [
            PooledCache(pool, hasher, block_size=block_tokens, own_blocks=own_blocks)
            for _ in range(num_engines)
        ]

    def needs(self, turn: Turn, engines: Sequence[SimEngine]) -> list[Need]:
        need = need_of(turn.work.input_tokens, _cached_tokens(self.by_engine[0], turn))
        return [need] * len(engines)


class OwnCaches:
    """Each engine's own, as a fleet has them. Found is what is there, or will be once the engine comes to the
    request: those ahead of it will have computed their prompts by then."""

    def __init__(self, num_engines: int, own_blocks: int, *, block_tokens: int) -> None:
        """own_blocks: of one engine."""
        hasher = TurnHasher(fingerprint(block_tokens))
        self.by_engine = [
            paged_cache(DEFAULT, own_blocks, hasher, block_size=block_tokens) for _ in range(num_engines)
        ]

    def needs(self, turn: Turn, engines: Sequence[SimEngine]) -> list[Need]:
        return [need_of(turn.work.input_tokens, self._found_tokens(turn, engine)) for engine in engines]

    def _found_tokens(self, turn: Turn, engine: SimEngine) -> int:
        cache, names = self.by_engine[engine.index], turn.block_hashes
        found = _cached_tokens(cache, turn) // cache.block_size
        limit = (turn.work.input_tokens - 1) // cache.block_size
        for theirs in _prompts_ahead(turn, engine, cache.block_size):
            # A hash names the whole prefix: whoever has this one has all before it.
            while found < min(limit, len(theirs)) and theirs[found] == names[found]:
                found += 1
        return found * cache.block_size


def need_of(num_tokens: int, num_cached: int) -> Need:
    """num_tokens: of the prompt; num_cached: leading ones that need not be computed."""
    left = num_tokens - num_cached
    return Need(left, attention_pairs(num_cached, left))


def _cached_tokens(cache: KVCacheManager, turn: Turn) -> int:
    sequence = cache.begin(TurnTokens.of(turn.work.input_tokens, turn.block_hashes))
    return cache.match(sequence).num_tokens


def _prompts_ahead(turn: Turn, engine: SimEngine, block_size: int) -> Iterator[Sequence[BlockHash]]:
    """Block hashes of those whom the engine has taken in or is about to before the turn."""
    for request in engine.scheduler:
        yield request.blocks.block_hashes
    for waiting, _ in takewhile(lambda item: item[0] is not turn, engine.inbox):
        yield waiting.block_hashes[: waiting.work.input_tokens // block_size]
