"""The kernels of rows, in Triton's interpreter, are their formulas rounded once, whatever the shape."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.layers.triton_rows import TritonRows
from tests.row_cases import Rows
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
seeds = st.integers(0, 10**6)
tokens = st.integers(1, 9)
widths = st.integers(1, 2200)


@given(
    dtype=dtypes, seed=seeds, num_tokens=tokens, width=widths, size=st.sampled_from([0.0, 1e-2, 1.0, 30.0])
)
@settings(max_examples=30)
def test_a_norm_is_its_formula_rounded_once(
    dtype: torch.dtype, seed: int, num_tokens: int, width: int, size: float
) -> None:
    Rows(dtype, seed).check_norm(num_tokens, width, size)
    Rows(dtype, seed).check_add_norm(num_tokens, width)


@given(dtype=dtypes, seed=seeds, num_tokens=tokens, width=widths, size=st.sampled_from([1e-2, 1.0, 30.0]))
@settings(max_examples=30)
def test_a_swish_product_is_its_formula_rounded_once(
    dtype: torch.dtype, seed: int, num_tokens: int, width: int, size: float
) -> None:
    Rows(dtype, seed).check_swish_product(num_tokens, width, size)


@given(
    dtype=dtypes,
    seed=seeds,
    num_tokens=tokens,
    num_queries=st.integers(1, 40),
    num_keys=st.integers(1, 9),
    half=st.integers(1, 130),
    has_norms=st.booleans(),
)
@settings(max_examples=30)
def test_turned_heads_are_their_formula_rounded_once(
    dtype: torch.dtype,
    seed: int,
    num_tokens: int,
    num_queries: int,
    num_keys: int,
    half: int,
    has_norms: bool,
) -> None:
    Rows(dtype, seed).check_turn(num_tokens, num_queries, num_keys, 2 * half, has_norms=has_norms)


@given(seed=seeds, num_tokens=tokens, half=st.integers(1, 70))
@settings(max_examples=15)
def test_turning_back_gives_what_there_was(seed: int, num_tokens: int, half: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(num_tokens, 5, 2 * half, generator=generator)
    angles = torch.randn(num_tokens, half, generator=generator).repeat(1, 2)
    turned = heads.clone()
    kernels = TritonRows()
    kernels.turn(turned, 3, 1, angles.cos(), angles.sin(), None)
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))
    kernels.turn(turned, 3, 1, angles.cos(), -angles.sin(), None)
    torch.testing.assert_close(turned, heads)
