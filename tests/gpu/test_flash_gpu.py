"""flash-attn on a card, where it is installed: the cases of every backend, in its types and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention import flash_paged
from replica.attention.flash_paged import FlashPaged
from replica.attention.kv_pages import LayerShape
from tests.attention_cases import Layer, Sequence, check

CUDA, BLOCK_SIZE = torch.device("cuda", 0), 256


def _why_skipped() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    return flash_paged.why_not(CUDA, torch.bfloat16, [LayerShape(2, 64, 64)], BLOCK_SIZE)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_skipped() is not None, reason=str(_why_skipped()))]

PLAIN = Layer(kv_heads=2, group=4, key_dim=64, value_dim=64, window=None, softcap=None, has_sinks=False)
LAYERS = [
    PLAIN,
    replace(PLAIN, window=100),
    replace(PLAIN, softcap=20.0),
    replace(PLAIN, key_dim=128, value_dim=128),
]


@given(
    layer=st.sampled_from(LAYERS),
    cuts=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_it_computes_dense_attention(
    layer: Layer, cuts: list[list[int]], dtype: torch.dtype, seed: int
) -> None:
    sequences = [Sequence(tuple(sum(pieces[:count]) for count in range(len(pieces) + 1))) for pieces in cuts]
    check(layer, BLOCK_SIZE, sequences, seed, FlashPaged(CUDA), dtype=dtype, device=CUDA)
