"""The coarse products that this machine has, and weights to try layers on."""

from __future__ import annotations

import pytest
import torch

from replica.layers.coarse_product import find_bfloat16, find_int8

BFLOAT16, INT8 = find_bfloat16(), find_int8()
needs_bfloat16 = pytest.mark.skipif(BFLOAT16 is None, reason="no bfloat16 product here")
needs_int8 = pytest.mark.skipif(INT8 is None, reason="no int8 product here")
both = pytest.mark.parametrize(
    "make_product", [pytest.param(BFLOAT16, marks=needs_bfloat16), pytest.param(INT8, marks=needs_int8)]
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
