"""Equal prefixes, and only they, have equal hashes; nothing of a process gets into them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import BlockHasher, Placeholder, hint, hints, placeholder_keys
from cache.fingerprint import HashAlgorithm
from cache.types import pack_tokens
from tests.fakes.cache import a_fingerprint

TOKENS = st.lists(st.integers(0, 2), max_size=14)
KEYS = st.dictionaries(
    st.integers(0, 3), st.lists(st.binary(max_size=2), min_size=1, max_size=2).map(tuple), max_size=2
)
# Short and alike, so that fields that ran together would meet.
ROOTS = st.fixed_dictionaries(
    {name: st.text("ab", max_size=2) for name in ("adapter", "adapter_digest", "salt")}
)
HASHERS = {
    algorithm: BlockHasher(a_fingerprint(block_size=3, hash_algorithm=algorithm))
    for algorithm in HashAlgorithm
}


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@given(one=st.tuples(ROOTS, TOKENS, KEYS), other=st.tuples(ROOTS, TOKENS, KEYS), is_alike=st.booleans())
@settings(max_examples=300)
def test_same_prefix_same_hash(algorithm: HashAlgorithm, one: Any, other: Any, is_alike: bool) -> None:
    hasher = HASHERS[algorithm]
    if is_alike:  # so that equal roots and long shared prefixes are common
        other = (one[0], one[1][:7] + other[1], one[2])
    chains = [
        hasher.chain(hasher.root(**root), pack_tokens(tokens), keys) for root, tokens, keys in (one, other)
    ]
    for index, (ours, theirs) in enumerate(zip(*chains, strict=False)):
        end = index + 1
        same = all((
            one[0] == other[0],
            one[1][: end * 3] == other[1][: end * 3],
            [one[2].get(i, ()) for i in range(end)] == [other[2].get(i, ()) for i in range(end)],
        ))  # fmt: skip
        assert (ours == theirs) == same


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@given(tokens=TOKENS, keys=KEYS, cut=st.integers(0, 4))
def test_a_chain_can_be_hashed_in_pieces(
    algorithm: HashAlgorithm, tokens: list[int], keys: dict[int, tuple[bytes, ...]], cut: int
) -> None:
    """The engine hashes the prompt at once and outputs block by block."""
    hasher, packed = HASHERS[algorithm], pack_tokens(tokens)
    root = hasher.root()
    whole = hasher.chain(root, packed, keys)
    assert len(whole) == len(tokens) // 3
    cut = min(cut, len(whole))
    head = hasher.extend(root, packed, 0, cut, keys)
    assert head + hasher.extend((head or [root])[-1], packed, cut, len(whole), keys) == whole
    assert all(len(block_hash) == 16 for block_hash in whole)
    assert hints(whole) == [hint(block_hash) for block_hash in whole]
    assert all(0 <= name < 1 << 64 for name in hints(whole))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from([b"cat", b"dog"])), max_size=3)
)
def test_every_placeholder_token_marks_its_block(runs: list[tuple[int, int, bytes]]) -> None:
    """Runs after one another, with gaps: a block has a key of exactly the runs that touch it."""
    placed, end = [], 0
    for gap, length, content in runs:
        placed.append(Placeholder(end + gap, length, content))
        end += gap + length
    keys = placeholder_keys(placed, 4)
    for block in range(end // 4 + 2):
        touching = [p for p in placed if any(t // 4 == block for t in range(p[0], p[0] + p[1]))]
        assert [key[:3] for key in keys.get(block, ())] == [p.content_hash for p in touching]
        assert (block in keys) == bool(touching)


SCRIPT = """
import sys
from cache.block_hash import BlockHasher
from cache.fingerprint import HashAlgorithm
from cache.types import pack_tokens
from tests.fakes.cache import a_fingerprint
for algorithm in HashAlgorithm:
    hasher = BlockHasher(a_fingerprint(hash_algorithm=algorithm))
    chain = hasher.chain(hasher.root(adapter="sql", salt="s"), pack_tokens(range(40)), {2: (b"cat",)})
    sys.stdout.write("".join(block_hash.hex() for block_hash in chain))
"""


def test_processes_agree_whatever_their_hash_seed() -> None:
    root = Path(__file__).parents[2]
    answers = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(answers) == 1
    assert len(answers.pop()) == 2 * 10 * 32
