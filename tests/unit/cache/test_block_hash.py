"""The hash rule, spelled out by hand once more, and what it must tell apart."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache.block_hash import (
    BlockHasher,
    ExtraKeys,
    PackedHashes,
    Placeholder,
    hint,
    hint_view,
    hints,
    placeholder_keys,
)
from cache.errors import ConfigError
from cache.fingerprint import HashAlgorithm, SaltMode
from cache.types import BlockHash, little_endian_bytes, pack_tokens
from tests.fakes.cache import a_fingerprint

TOKENS = pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9])


def field(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        (HashAlgorithm.SHA256, lambda message: hashlib.sha256(message).digest()[:16]),
        (HashAlgorithm.XXH3_128, xxhash.xxh3_128_digest),
    ],
)
def test_the_rule_by_hand(algorithm: HashAlgorithm, digest: Callable[[bytes], bytes]) -> None:
    hasher = BlockHasher(a_fingerprint(hash_algorithm=algorithm))
    message = b"warmpath root" + b"".join(
        map(
            field,
            [struct.pack("<I", 1), struct.pack("<I", 4), b"tiny", b"r1", b"float32", b"sql", b"d1", b"salt"],
        )
    )
    root = hashlib.sha256(message).digest()[:16]
    assert hasher.root(adapter="sql", adapter_digest="d1", salt="salt") == root
    first = digest(root + struct.pack("<4i", 1, 2, 3, 4))
    second = digest(first + struct.pack("<4i", 5, 6, 7, 8) + field(b"cat") + field(b"dog"))
    assert hasher.chain(BlockHash(root), TOKENS, {1: (b"cat", b"dog")}) == [first, second]


def test_anything_about_a_request_changes_its_root() -> None:
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {}),
        ({"model_id": "other"}, {}),
        ({"revision": "r2"}, {}),
        ({"kv_dtype": "bfloat16"}, {}),
        ({"block_size": 8}, {}),
        ({"model_id": "tinyr", "revision": "1"}, {}),
        ({}, {"salt": "a"}),
        ({}, {"adapter": "a"}),
        ({}, {"adapter_digest": "a"}),
        ({}, {"salt": "ab", "adapter": "c"}),
        ({}, {"salt": "b", "adapter": "ca"}),
        ({}, {"salt": "\ud800"}),  # JSON can spell a lone surrogate
        ({}, {"salt": "?"}),
    ]
    roots = [BlockHasher(a_fingerprint(**changes)).root(**request) for changes, request in cases]
    assert all(a != b for a, b in combinations(roots, 2))
    assert {len(root) for root in roots} == {16}


def test_what_tokenizes_or_salts_is_not_what_hashes() -> None:
    """Template and salt mode change which tokens and salts come, not what they hash to."""
    changed = a_fingerprint(template_digest="other", salt_mode=SaltMode.TENANT)
    assert BlockHasher(changed).root() == BlockHasher(a_fingerprint()).root()


def test_the_root_cannot_be_forged_by_choosing_the_fast_hash() -> None:
    fast = BlockHasher(a_fingerprint(hash_algorithm=HashAlgorithm.XXH3_128))
    assert fast.root(salt="s") == BlockHasher(a_fingerprint()).root(salt="s")


def test_only_full_blocks_have_a_hash() -> None:
    hasher = BlockHasher(a_fingerprint())
    assert [len(hasher.chain(hasher.root(), TOKENS[:n])) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(AssertionError):
        hasher.extend(hasher.root(), TOKENS, 1, 3)


def test_equal_blocks_after_other_prefixes_differ() -> None:
    hasher = BlockHasher(a_fingerprint())
    one = hasher.chain(hasher.root(), pack_tokens([1, 2, 3, 4, 5, 6, 7, 8]))
    other = hasher.chain(hasher.root(), pack_tokens([4, 3, 1, 2, 5, 6, 7, 8]))
    assert not set(one) & set(other)


def test_extra_keys_cannot_run_together() -> None:
    hasher = BlockHasher(a_fingerprint())
    keys: list[ExtraKeys] = [
        {},
        {0: (b"",)},
        {0: (b"ab",)},
        {0: (b"a", b"b")},
        {0: (b"", b"ab")},
        {0: (b"b", b"a")},
    ]
    hashes = [hasher.chain(hasher.root(), TOKENS[:4], key)[0] for key in keys]
    assert len(set(hashes)) == len(keys)
    assert hasher.chain(hasher.root(), TOKENS[:4], {1: (b"a",)})[0] == hashes[0]


def test_hint_is_the_low_half() -> None:
    assert hint(BlockHash(bytes(range(16)))) == 0x0706050403020100


def test_two_images_are_told_from_the_same_two_otherwise_cut() -> None:
    """Placeholder tokens are all alike: 10 + 6 of them look like 6 + 10."""
    one = placeholder_keys([Placeholder(0, 10, b"A"), Placeholder(10, 6, b"B")], 16)
    other = placeholder_keys([Placeholder(0, 6, b"A"), Placeholder(6, 10, b"B")], 16)
    assert one[0] != other[0]


def test_an_empty_run_marks_nothing() -> None:
    assert placeholder_keys([Placeholder(3, 0, b"A")], 4) == {}


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ConfigError, match="block_size = 0"):
        BlockHasher(a_fingerprint(block_size=0))


def test_hints_seen_through_a_view_are_the_hints() -> None:
    hasher = BlockHasher(a_fingerprint())
    hashes = hasher.chain(hasher.root(), pack_tokens(range(64)))
    view = hint_view(hashes)
    assert list(view) == [hint(block_hash) for block_hash in hashes] == hints(hashes)
    assert (view[0], view[-1], len(view)) == (hint(hashes[0]), hint(hashes[-1]), len(hashes))
    assert not hint_view([])


def test_packed_tokens_hash_like_the_tokens() -> None:
    hasher = BlockHasher(a_fingerprint())
    tokens = pack_tokens(range(5 * hasher.block_size))
    packed = little_endian_bytes(tokens)
    root = hasher.root()
    assert hasher.extend_packed(root, packed) == b"".join(hasher.chain(root, tokens))
    with pytest.raises(AssertionError):
        hasher.extend_packed(root, packed[:-4])


@given(
    hashes=st.lists(st.binary(min_size=16, max_size=16), max_size=12),
    index=st.integers(-13, 12),
    piece=st.slices(12),
)
def test_packed_hashes_are_the_sequence_of_the_hashes(hashes: list[bytes], index: int, piece: slice) -> None:
    expected = [BlockHash(one) for one in hashes]
    packed = PackedHashes.of(expected)
    assert list(packed) == expected
    assert len(packed) == len(expected)
    assert bool(packed) is bool(expected)
    assert list(packed[piece]) == expected[piece]
    assert list(packed + expected) == expected + expected
    assert list(hint_view(packed)) == hints(expected)
    if -len(expected) <= index < len(expected):
        assert packed[index] == expected[index]
    else:
        with pytest.raises(IndexError):
            packed[index]


def test_packed_hashes_travel_as_their_bytes_and_equal_only_their_like() -> None:
    hasher = BlockHasher(a_fingerprint())
    hashes = hasher.chain(hasher.root(), pack_tokens(range(64 * hasher.block_size)))
    packed = PackedHashes.of(hashes)
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert len(pickle.dumps(packed)) < len(pickle.dumps(tuple(hashes)))
    assert PackedHashes.of(packed) is packed
    assert hash(packed) == hash(PackedHashes(b"".join(hashes)))
    assert packed != PackedHashes.of(hashes[:-1])
    assert packed != hashes
    assert not PackedHashes()
    with pytest.raises(AssertionError):
        PackedHashes(b"half a hash")
