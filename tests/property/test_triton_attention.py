"""The Triton kernels, in Triton's interpreter, equal dense attention.

The interpreter runs one program at a time and costs milliseconds for each tile of keys, so shapes are
small, and so are cards: with hardly any shared memory tiles are 16 by 16, with processors keys are split.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention import tiling
from replica.attention.tiling import Card
from replica.attention.triton_paged import TritonPaged
from tests.attention_cases import CPU, Layer, Sequence, batches, check
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton

WHOLE = Card(processors=1, shared_bytes=tiling.SHARED_BUDGET)
SMALL_TILES = Card(processors=1, shared_bytes=1)
SPLITS = Card(processors=6, shared_bytes=1)
CARDS = (WHOLE, SMALL_TILES, SPLITS)

small_layers = st.builds(
    Layer,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    key_dim=st.sampled_from([8, 16]),
    value_dim=st.sampled_from([8, 12]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.sampled_from([1.0, 20.0]),
    has_sinks=st.booleans(),
)
wide_layers = st.builds(
    Layer,
    kv_heads=st.just(1),
    group=st.sampled_from([1, 2, 3, 7, 20]),
    key_dim=st.sampled_from([32, 40, 64, 80]),
    value_dim=st.sampled_from([32, 48, 64]),
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.sampled_from([1.0, 20.0]),
    has_sinks=st.booleans(),
)


def check_on(
    card: Card,
    layer: Layer,
    block_size: int,
    sequences: list[Sequence],
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "FEWEST_TILES_PER_SPLIT", 1)  # splits of short sequences, too
        check(layer, block_size, sequences, seed, TritonPaged(CPU, card), dtype=dtype)


@given(
    layer=small_layers, batch=batches(max_sequences=3), seed=st.integers(0, 1000), card=st.sampled_from(CARDS)
)
@settings(max_examples=10)
def test_kernels_compute_dense_attention(
    layer: Layer, batch: tuple[int, list[Sequence]], seed: int, card: Card
) -> None:
    """Chunks with cached prefixes beside decodes and twins; windows, caps, sinks; any block size."""
    check_on(card, layer, *batch, seed)


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(600)
@given(
    layer=small_layers | wide_layers,
    batch=batches(max_sequences=3),
    seed=st.integers(0, 10**6),
    card=st.sampled_from(CARDS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=30)
def test_kernels_compute_dense_attention_in_many_more_shapes(
    layer: Layer, batch: tuple[int, list[Sequence]], seed: int, card: Card, dtype: torch.dtype
) -> None:
    check_on(card, layer, *batch, seed, dtype)
