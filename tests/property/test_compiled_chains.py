"""Chains made in C are those made in Python, whatever the blocks and wherever a chain goes on."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache import block_hash
from cache.block_hash import BlockHasher
from cache.fingerprint import HashAlgorithm
from cache.types import BlockHash, pack_tokens
from tests.fakes.cache import a_fingerprint

chains = pytest.importorskip("cache.native.chains", reason="not compiled: no C compiler at the installation")


@pytest.fixture(scope="module", params=HashAlgorithm)
def algorithm(request: pytest.FixtureRequest) -> HashAlgorithm:
    return HashAlgorithm(request.param)


def hashers(algorithm: HashAlgorithm, block_size: int) -> tuple[BlockHasher, BlockHasher]:
    """In C where blocks are of a usual size, and in Python."""
    mark = a_fingerprint(hash_algorithm=algorithm, block_size=block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_hash, "compiled", None)
        plain = BlockHasher(mark)
    return BlockHasher(mark), plain


@given(
    data=st.data(),
    block_size=st.integers(1, 70),
    num_blocks=st.integers(0, 6),
    parent=st.binary(min_size=16, max_size=16),
)
def test_the_same_hashes(
    algorithm: HashAlgorithm, data: st.DataObject, block_size: int, num_blocks: int, parent: bytes
) -> None:
    in_c, plain = hashers(algorithm, block_size)
    tokens = data.draw(st.binary(min_size=4 * block_size * num_blocks, max_size=4 * block_size * num_blocks))
    packed = plain.extend_packed(BlockHash(parent), tokens)
    assert len(packed) == 16 * num_blocks
    assert in_c.extend_packed(BlockHash(parent), memoryview(tokens)) == packed
    ids = pack_tokens(memoryview(tokens).cast("i"))
    assert in_c.extend(BlockHash(parent), ids, 0, num_blocks) == plain.extend(
        BlockHash(parent), ids, 0, num_blocks
    )


@given(first=st.integers(0, 12), more=st.integers(0, 12))
def test_a_chain_goes_on_where_it_was_left(algorithm: HashAlgorithm, first: int, more: int) -> None:
    in_c, _ = hashers(algorithm, 16)
    ids = pack_tokens(range(16 * (first + more)))
    whole = in_c.chain(in_c.root(), ids)
    begun = in_c.extend(in_c.root(), ids, 0, first)
    assert begun + in_c.extend(begun[-1] if begun else in_c.root(), ids, first, first + more) == whole


@pytest.mark.parametrize("size", range(1, chains.MOST_BLOCK_BYTES + 1))
def test_every_length_of_a_block(size: int) -> None:
    """Also those that no tokens have: how a message's last bytes are hashed depends on its length."""
    parent, block = bytes(range(16)), bytes(index % 251 for index in range(size))
    message = parent + block
    assert chains.xxh3_chain(size, parent, block) == xxhash.xxh3_128_digest(message)
    assert chains.sha256_chain(size, parent, block) == hashlib.sha256(message).digest()[:16]


@pytest.mark.parametrize(
    ("block_bytes", "parent", "tokens", "says"),
    [
        (0, bytes(16), b"", "block_bytes = 0: needs 1 to 224"),
        (-1, bytes(16), b"", "block_bytes = -1: needs 1 to 224"),
        (225, bytes(16), bytes(225), "block_bytes = 225: needs 1 to 224"),
        (64, bytes(15), bytes(64), "parent of 15 bytes: needs 16"),
        (64, bytes(16), bytes(65), "tokens of 65 bytes: needs whole blocks of 64"),
    ],
)
def test_other_sizes_are_refused(block_bytes: int, parent: bytes, tokens: bytes, says: str) -> None:
    for make in (chains.xxh3_chain, chains.sha256_chain):
        with pytest.raises(ValueError, match=says):
            make(block_bytes, parent, tokens)


@pytest.mark.parametrize("make", [chains.xxh3_chain, chains.sha256_chain])
def test_others_run_while_a_long_prompt_is_hashed(make: Callable[[int, bytes, bytes], bytes]) -> None:
    tokens, begun, found = bytes(128 << 20), threading.Event(), list[bytes]()

    def hash_all() -> None:
        begun.set()
        found.append(make(64, bytes(16), tokens))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # nobody has to yield: others run where it is given up
    try:
        thread = threading.Thread(target=hash_all)
        thread.start()
        begun.wait()
        turns = 0
        while not found:
            turns += 1
            time.sleep(0.001)
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert turns > 5
