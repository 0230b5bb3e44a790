"""A cache of hashes changes nothing but the time it takes, however little room it has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.block_hash import BlockHasher
from cache.types import pack_tokens
from router.chain_cache import ENTRY_BYTES, STRIDE_TOKENS, ChainCache
from tests.fakes_cache import a_fingerprint

HASHER = BlockHasher(a_fingerprint(block_size=256))
# Prompts as paths in a tree: each step is a stride of one token, then a rest.
PROMPTS = st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(0, STRIDE_TOKENS - 1))


@given(
    prompts=st.lists(st.tuples(PROMPTS, st.sampled_from(["", "salt"])), max_size=25),
    room=st.integers(0, 12),
)
def test_the_hashes_are_the_hashers_own(prompts: list[tuple[tuple[list[int], int], str]], room: int) -> None:
    entry = 16 * STRIDE_TOKENS // HASHER.block_size + ENTRY_BYTES
    cache = ChainCache(HASHER, max_bytes=room * entry)
    for (path, rest), salt in prompts:
        tokens = pack_tokens([step for step in path for _ in range(STRIDE_TOKENS)] + [7] * rest)
        root = HASHER.root(salt=salt)
        assert cache.chain(root, tokens) == HASHER.chain(root, tokens)
        assert cache.num_entries <= room
        # What is kept of this prompt is its beginning, as much as there is room for.
        assert cache.begin(root, tokens).num_known_strides == min(len(tokens) // STRIDE_TOKENS, room)
