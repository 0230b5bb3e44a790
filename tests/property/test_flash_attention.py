"""Attention through flash-attn's functions, as documented, equals dense attention over each sequence alone.

Whether the package does what its documentation says is for `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention.flash_paged import FlashPaged
from tests.attention_cases import CPU, Layer, Sequence, batches, check, layers
from tests.fakes.flash_attention import FLASH


def served(layer: Layer) -> Layer:
    return replace(layer, value_dim=layer.key_dim, has_sinks=False)


@given(layer=layers().map(served), batch=batches(max_sequences=4), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_flash_attention_is_dense_attention(
    layer: Layer, batch: tuple[int, list[Sequence]], seed: int
) -> None:
    block_size, sequences = batch
    check(layer, block_size, sequences, seed, FlashPaged(CPU, FLASH))


@pytest.mark.long
@given(layer=layers().map(served), batch=batches(), seed=st.integers(0, 10**6))
@settings(max_examples=150)
def test_flash_attention_is_dense_attention_in_many_more_shapes(
    layer: Layer, batch: tuple[int, list[Sequence]], seed: int
) -> None:
    block_size, sequences = batch
    check(layer, block_size, sequences, seed, FlashPaged(CPU, FLASH))
