"""A cache of hashes changes nothing but the time it takes, however little room it has."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from cache.block_hash import BlockHasher, lookup_key
from cache.types import pack_tokens
from router.prompts.chain_cache import ENTRY_BYTES, RUN_TOKENS, ChainCache
from tests.fakes.cache import a_fingerprint

HASHER = BlockHasher(a_fingerprint(block_size=256))
RUN_BYTES = 4 * RUN_TOKENS + 16 * RUN_TOKENS // HASHER.block_size + ENTRY_BYTES
# Prompts as paths in a tree: each step is half a run of one token, then a rest.
PROMPTS = st.tuples(st.lists(st.integers(0, 1), max_size=7), st.integers(0, RUN_TOKENS // 2 - 1))


@given(
    prompts=st.lists(st.tuples(PROMPTS, st.sampled_from(["", "salt"])), max_size=25),
    room=st.integers(0, 12 * RUN_BYTES),
    key_bytes=st.sampled_from([0, 1, 8]),
)
def test_the_hashes_are_the_hashers_own(
    prompts: list[tuple[tuple[list[int], int], str]], room: int, key_bytes: int
) -> None:
    """Whatever is evicted, and even if different runs share a key."""
    cache = ChainCache(HASHER, max_bytes=room)
    mask = 256**key_bytes - 1
    with patch(
        "router.prompts.chain_cache.lookup_key", lambda message, before: lookup_key(message, before) & mask
    ):
        for (path, rest), salt in prompts:
            tokens = pack_tokens([step for step in path for _ in range(RUN_TOKENS // 2)] + [7] * rest)
            root = HASHER.root(salt=salt)
            assert list(cache.chain(root, tokens)) == HASHER.chain(root, tokens)
            assert cache.num_bytes == sum(run.num_bytes for run in cache._runs.values()) <= room
            if key_bytes == 8 and len(tokens) * RUN_BYTES <= room * RUN_TOKENS:
                assert cache.begin(root, tokens).num_missing_tokens <= HASHER.block_size * 4
