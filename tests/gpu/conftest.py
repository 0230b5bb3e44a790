"""What all checks on a card share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """TF32 keeps 10 bits of mantissa: two ways to the same product would then differ by more than ties."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
