"""One pool, several engines: content is everybody's, room for running sequences is not."""

from __future__ import annotations

import pytest

from cache.block_pool import BlockPool
from cache.errors import NoFreeBlocks
from cache.kv_cache_manager import SequenceBlocks
from loadtest.simulation.pooled_cache import PooledCache
from loadtest.simulation.turns import TurnHasher, TurnTokens, fingerprint, make_turns
from tests.fakes.simulation import BLOCK_TOKENS, Blocks, request, workload

TURNS = make_turns(
    workload(
        request(0.0, 64, 100, (shared := Blocks().extend((), 64)), 0),
        request(1.0, 70, 1, (*shared, 90), 1),
        request(2.0, 64, 1, (100, 101, 102, 103), 2),
    )
)


@pytest.fixture
def caches() -> tuple[PooledCache, PooledCache]:
    """Two engines with room for six blocks each."""
    pool, hasher = BlockPool(12), TurnHasher(fingerprint(BLOCK_TOKENS))
    one, other = (PooledCache(pool, hasher, block_size=BLOCK_TOKENS, own_blocks=6) for _ in range(2))
    return one, other


def start(cache: PooledCache, turn: int) -> SequenceBlocks:
    """Admit a whole prompt and commit it."""
    tokens = TURNS[turn].work.input_tokens
    sequence = cache.begin(TurnTokens.of(tokens, TURNS[turn].block_hashes))
    hit = cache.match(sequence)
    cache.admit(sequence, hit, tokens - hit.num_tokens)
    cache.commit_step()
    return sequence


def test_what_one_engine_holds_the_other_finds(caches: tuple[PooledCache, PooledCache]) -> None:
    one, other = caches
    start(one, 0)
    sequence = other.begin(TurnTokens.of(70, TURNS[1].block_hashes))
    assert other.match(sequence).num_tokens == 64


def test_a_found_block_takes_room_of_its_own_engine_once(caches: tuple[PooledCache, PooledCache]) -> None:
    one, other = caches
    first = start(one, 0)
    assert (one.num_free, other.num_free) == (2, 6)
    start(other, 1)  # four found blocks and one of its own
    assert (one.num_free, other.num_free) == (2, 1)
    twin = start(one, 1)  # on four blocks that the engine holds already
    assert one.num_free == 1
    one.release(first)
    assert one.num_free == 1  # the twin holds them still
    one.release(twin)
    assert one.num_free == 6


def test_an_engine_takes_no_more_than_its_own_room(caches: tuple[PooledCache, PooledCache]) -> None:
    """However empty the pool is."""
    one, _ = caches
    start(one, 0)
    sequence = one.begin(TurnTokens.of(64, TURNS[2].block_hashes))
    with pytest.raises(NoFreeBlocks):
        one.admit(sequence, one.match(sequence), 64)
    assert one.num_free == 2
    assert sequence.block_table == []


def test_growth_counts(caches: tuple[PooledCache, PooledCache]) -> None:
    one, _ = caches
    sequence = start(one, 0)
    sequence.token_ids.extend(TurnTokens.of(36, ()))
    one.grow(sequence, 96)
    assert one.num_free == 0
    with pytest.raises(NoFreeBlocks):
        one.grow(sequence, 100)
    one.release(sequence)
    assert one.num_free == 6
    assert one.pool.num_free == 12
