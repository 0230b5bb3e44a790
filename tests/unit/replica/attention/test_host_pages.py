"""Blocks' bytes come back from host memory as they went, whatever the layers' shapes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cache.host_tier import BlockMoves
from replica.attention import host_pages
from replica.attention.host_pages import HostPages, piece_sizes
from replica.attention.kv_pages import KVPages

NUM_BLOCKS, NUM_SLOTS = 6, 4


def layer(*shape: int) -> Any:
    keys = torch.randn(NUM_BLOCKS, *shape)
    return SimpleNamespace(keys=keys, values=torch.randn(NUM_BLOCKS, *shape[:-1], shape[-1] + 1))


@pytest.mark.parametrize("largest_piece", [1, 1200, 1 << 30])
@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
def test_what_was_saved_is_what_is_loaded(
    staging_bytes: int, largest_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of one row, and all at once; into blocks that were overwritten in between."""
    monkeypatch.setattr(host_pages, "STAGING_BYTES", staging_bytes)
    monkeypatch.setattr(host_pages, "LARGEST_PIECE", largest_piece)
    layers = [layer(4, 2, 8), layer(4, 1, 3)]
    before = [(each.keys.clone(), each.values.clone()) for each in layers]
    pages = HostPages(cast("KVPages", SimpleNamespace(layers=lambda: layers)), NUM_SLOTS)
    [saved] = pages.copy(BlockMoves(saves=((5, 0), (1, 3), (2, 1))))
    assert (saved.is_load, saved.num_blocks) == (False, 3)
    for each in layers:
        each.keys.zero_()
        each.values.zero_()
    [loaded] = pages.copy(BlockMoves(loads=((3, 0), (0, 4))))
    assert (loaded.is_load, loaded.num_blocks) == (True, 2)
    for each, (keys, values) in zip(layers, before, strict=True):
        for now, then in ((each.keys, keys), (each.values, values)):
            assert torch.equal(now[0], then[1])
            assert torch.equal(now[4], then[5])
            assert not now[[1, 2, 3, 5]].any(), "a block that nobody asked for"


def test_a_slot_that_is_saved_and_loaded_at_once_is_saved_first() -> None:
    layers = [layer(4, 2, 8)]
    wanted = layers[0].keys[3].clone()
    pages = HostPages(cast("KVPages", SimpleNamespace(layers=lambda: layers)), NUM_SLOTS)
    pages.copy(BlockMoves(saves=((3, 2),), loads=((2, 0),)))
    assert torch.equal(layers[0].keys[0], wanted)


def test_nothing_is_left_after_closing() -> None:
    layers = [layer(4, 2, 8)]
    pages = HostPages(cast("KVPages", SimpleNamespace(layers=lambda: layers)), NUM_SLOTS)
    held = [weakref.ref(each) for each in (*pages._rows, pages._out, pages._in, layers[0].keys)]
    layers.clear()
    assert all(each() is not None for each in held)
    pages.close()
    pages.close()
    assert all(each() is None for each in held)


@given(num_rows=st.integers(0, 100_000), row_bytes=st.integers(1, 16 << 20))
@example(num_rows=10 << 10, row_bytes=2 << 20)  # 20 GiB, of which one piece would be 32
@example(num_rows=9 << 10, row_bytes=(9 << 20) // 4)
def test_locked_memory_is_little_more_than_was_asked_for(num_rows: int, row_bytes: int) -> None:
    """Torch takes a power of two of each piece."""
    sizes = piece_sizes(num_rows, row_bytes)
    assert sum(sizes) == num_rows
    taken = sum(1 << (size * row_bytes - 1).bit_length() for size in sizes)
    assert taken - num_rows * row_bytes <= len(sizes) * row_bytes
    assert len(sizes) <= 1 + num_rows * row_bytes / (host_pages.LARGEST_PIECE - row_bytes) + 30
