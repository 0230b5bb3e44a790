"""Packed tokens: 32 bits each, little-endian whatever the machine."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from cache.types import little_endian_bytes, little_endian_view, pack_tokens


def test_tokens_are_packed_little_endian() -> None:
    assert little_endian_bytes(pack_tokens([1, -2, 2**31 - 1])) == bytes.fromhex("01000000 feffffff ffffff7f")


def test_bytes_are_swapped_on_a_big_endian_machine_without_touching_the_tokens() -> None:
    tokens = pack_tokens([1, 256])
    with mock.patch.object(sys, "byteorder", "big"):
        assert little_endian_bytes(tokens) == bytes.fromhex("00000001 00000100")
        assert little_endian_view(tokens) == bytes.fromhex("00000001 00000100")
    assert list(tokens) == [1, 256]


def test_a_view_is_the_tokens_own_memory_which_cannot_grow_meanwhile() -> None:
    tokens = pack_tokens([1, 256])
    view = little_endian_view(tokens)
    assert view == little_endian_bytes(tokens)
    with pytest.raises(BufferError):
        tokens.append(3)
    tokens[0] = 2
    assert view[0] == 2


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_ids_outside_int32_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])
