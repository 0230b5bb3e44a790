"""Hashes of known prompts: what is hashed again, what is shared, what leaves first."""

from __future__ import annotations

from array import array

import pytest

from cache.block_hash import IS_COMPILED, BlockHasher
from cache.fingerprint import HashAlgorithm
from cache.types import pack_tokens
from router.prompts.chain_cache import DEFAULT_MAX_BYTES, ENTRY_BYTES, RUN_TOKENS, ChainCache, room_for
from tests.fakes.cache import a_fingerprint

BLOCK = 16


@pytest.fixture(params=list(HashAlgorithm))
def hasher(request: pytest.FixtureRequest) -> BlockHasher:
    return BlockHasher(a_fingerprint(block_size=BLOCK, hash_algorithm=request.param))


def prompt(length: int, first: int = 0) -> array[int]:
    return pack_tokens(range(first, first + length))


def test_a_next_turn_hashes_only_what_is_new(hasher: BlockHasher) -> None:
    cache, root = ChainCache(hasher), hasher.root()
    first = prompt(8000)
    assert cache.begin(root, first).num_missing_tokens == 8000
    assert list(cache.chain(root, first)) == hasher.chain(root, first)
    second = first + prompt(500, first=90_000)
    known = cache.begin(root, second)
    assert known.num_missing_tokens == 496, "the last of them are no full block"
    known.finish()
    assert list(known.hashes) == hasher.chain(root, second)


def test_another_salt_finds_nothing(hasher: BlockHasher) -> None:
    cache, tokens = ChainCache(hasher), prompt(4096)
    cache.chain(hasher.root(salt="one"), tokens)
    other = hasher.root(salt="two")
    assert cache.begin(other, tokens).num_missing_tokens == 4096
    assert list(cache.chain(other, tokens)) == hasher.chain(other, tokens)


def test_what_differs_in_the_first_token_shares_nothing(hasher: BlockHasher) -> None:
    cache, root, tokens = ChainCache(hasher), hasher.root(), prompt(4096)
    cache.chain(root, tokens)
    tokens[0] += 1
    assert list(cache.chain(root, tokens)) == hasher.chain(root, tokens)
    assert cache.num_runs == 8


def test_short_prompts_go_on_from_each_other(hasher: BlockHasher) -> None:
    cache, root = ChainCache(hasher), hasher.root()
    for length in (0, 1, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 1, RUN_TOKENS - 1):
        assert list(cache.chain(root, prompt(length))) == hasher.chain(root, prompt(length))
    assert cache.num_runs == 1
    assert cache.begin(root, prompt(RUN_TOKENS)).num_missing_tokens == BLOCK
    other = prompt(3 * BLOCK) + prompt(3 * BLOCK, first=70_000)
    assert cache.begin(root, other).num_missing_tokens == 3 * BLOCK


def test_a_forged_key_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes two runs share a key is told nothing by it: what is found is compared."""
    hasher = BlockHasher(a_fingerprint(block_size=BLOCK))
    monkeypatch.setattr("router.prompts.chain_cache.lookup_key", lambda message, before: 7)
    cache, root = ChainCache(hasher), hasher.root()
    for first in (0, 50_000, 0):
        for length in (RUN_TOKENS, 3 * RUN_TOKENS, 3 * RUN_TOKENS + 5 * BLOCK):
            tokens = prompt(length, first=first)
            assert list(cache.chain(root, tokens)) == hasher.chain(root, tokens)
    assert cache.num_bytes == sum(run.num_bytes for run in cache._runs.values())


def test_a_long_prompts_end_leaves_before_its_beginning() -> None:
    hasher = BlockHasher(a_fingerprint(block_size=BLOCK))
    room = 5 * (4 * RUN_TOKENS + 16 * RUN_TOKENS // BLOCK + ENTRY_BYTES)
    cache, root = ChainCache(hasher, max_bytes=room), hasher.root()
    cache.chain(root, prompt(4 * RUN_TOKENS))
    cache.chain(root, prompt(3 * RUN_TOKENS, first=100_000))
    assert cache.num_runs == 5
    assert cache.num_bytes <= room
    assert cache.begin(root, prompt(4 * RUN_TOKENS)).num_missing_tokens == 2 * RUN_TOKENS
    assert cache.begin(root, prompt(3 * RUN_TOKENS, first=100_000)).num_missing_tokens == 0


def test_a_cache_without_room_keeps_nothing() -> None:
    hasher = BlockHasher(a_fingerprint(block_size=BLOCK))
    cache, root, tokens = ChainCache(hasher, max_bytes=0), hasher.root(), prompt(5000)
    assert list(cache.chain(root, tokens)) == hasher.chain(root, tokens)
    assert cache.num_runs == 0


def test_blocks_longer_than_a_run_are_runs() -> None:
    hasher = BlockHasher(a_fingerprint(block_size=4096))
    cache, root, tokens = ChainCache(hasher), hasher.root(), prompt(10_000)
    assert cache.chain(root, tokens) == cache.chain(root, tokens)
    assert list(cache.chain(root, tokens)) == hasher.chain(root, tokens)
    assert cache.begin(root, tokens).num_missing_tokens == 0


def test_nothing_is_kept_where_hashing_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = a_fingerprint(block_size=BLOCK, hash_algorithm=HashAlgorithm.XXH3_128)
    secure = a_fingerprint(block_size=BLOCK, hash_algorithm=HashAlgorithm.SHA256)
    large = a_fingerprint(block_size=64, hash_algorithm=HashAlgorithm.XXH3_128)
    if IS_COMPILED:
        assert room_for(BlockHasher(fast)) == 0
    assert {room_for(BlockHasher(mark)) for mark in (secure, large)} == {DEFAULT_MAX_BYTES}
    monkeypatch.setattr("cache.block_hash.compiled", None)
    assert room_for(BlockHasher(fast)) == DEFAULT_MAX_BYTES
