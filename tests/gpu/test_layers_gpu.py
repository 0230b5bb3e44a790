"""Decoder layers computed by kernels on a card, beside families' own, in every type.

`make test-gpu`. Skipped in a process that interprets Triton's kernels: nothing of the card would be tried.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention import triton_paged
from replica.attention.kv_pages import LayerShape
from replica.layers.card_block import CardBlock, fuse_blocks
from tests.layer_models import check_all_replaced, fuse, model_of
from tests.row_cases import Rows


def _why_skipped() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    return triton_paged.why_not(torch.device("cuda", 0), torch.float32, [LayerShape(2, 64, 64)])


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_skipped() is not None, reason=str(_why_skipped()))]

CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative, of logits: both ways round, and two layers add up.
MOST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 64, 2049])
def test_the_shapes_of_an_8b_network(num_tokens: int, dtype: torch.dtype) -> None:
    rows = Rows(dtype, device=CUDA)
    rows.check_norm(num_tokens, 4096)
    rows.check_add_norm(num_tokens, 4096)
    rows.check_turn(num_tokens, 32, 8, 128, has_norms=True)
    rows.check_turn(num_tokens, 32, 8, 128, has_norms=False)
    rows.check_swish_product(num_tokens, 12_288)


@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(1, 130),
    width=st.integers(1, 9000),
    heads=st.tuples(st.integers(1, 71), st.integers(1, 9)),
    half=st.integers(1, 128),
    has_norms=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_kernels_are_their_formulas_rounded_once(
    dtype: torch.dtype,
    seed: int,
    num_tokens: int,
    width: int,
    heads: tuple[int, int],
    half: int,
    has_norms: bool,
) -> None:
    rows = Rows(dtype, seed, CUDA)
    rows.check_norm(num_tokens, width)
    rows.check_add_norm(num_tokens, width)
    rows.check_turn(num_tokens, *heads, 2 * half, has_norms=has_norms)
    rows.check_swish_product(num_tokens, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 60])
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("llama", LARGE),
        ("llama", {"mlp_bias": True, "attention_bias": True, "head_dim": 80}),
        ("qwen2", LARGE),
        ("qwen3", LARGE),
        ("mistral", {"sliding_window": 10}),
    ],
)
def test_a_replaced_layer_answers_alike(
    model_type: str, sizes: dict[str, Any], num_tokens: int, dtype: torch.dtype
) -> None:
    # Narrower draws: the logits of a wide network would differ by what its products make of rounding.
    spread = {"initializer_range": 0.05} if "hidden_size" in sizes else {}
    model = model_of(model_type, **sizes, **spread).to(CUDA, dtype)
    check_all_replaced(model, fuse_blocks, CardBlock, num_tokens, MOST_DIFFERENCE[dtype])


@pytest.mark.parametrize("model_type", ["gemma2", "glm", "cohere", "phi3"])
def test_a_layer_that_computes_otherwise_stays(model_type: str) -> None:
    sizes = {"head_dim": 16} if model_type in ("gemma2", "glm") else {}
    assert fuse(model_of(model_type, **sizes).to(CUDA, torch.bfloat16), fuse_blocks) == 0


def test_memory_grows_by_a_few_layers_and_goes_back() -> None:
    """Of sixteen: compared in float32, then put together, one by one."""
    # From its first product on cuBLAS keeps 8 MiB or 32, more than is allowed here; this may be run alone.
    fuse(model_of("llama").to(CUDA, torch.bfloat16), fuse_blocks)
    model = model_of("llama", num_hidden_layers=16, **LARGE).to(CUDA, torch.bfloat16)
    layer_bytes = sum(each.numel() * each.element_size() for each in model.model.layers[0].parameters())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert fuse(model, fuse_blocks) == 16
    assert torch.cuda.max_memory_allocated() - held < 5 * layer_bytes
    assert torch.cuda.memory_allocated() - held < layer_bytes // 4
