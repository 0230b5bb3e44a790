"""Products that do one more step give what the step by itself would."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from replica.layers import combining_linear, packed_linear
from replica.layers.combining_linear import CombiningLinear, find_combining_kernels, suited

KERNELS = find_combining_kernels()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="this torch has no oneDNN")


@needs_kernels
@pytest.mark.parametrize("width", [40, 160, 3000], ids=["deep", "small", "large"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("has_avx512", [True, False], ids=["avx512", "avx2"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 33, 512])
def test_each_step_is_what_it_is_by_itself(
    num_rows: int, has_avx512: bool, has_bias: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way is chosen for this machine, the other one holds here as well."""
    torch.manual_seed(num_rows)
    assert KERNELS is not None
    monkeypatch.setattr(combining_linear, "HAS_AVX512", has_avx512)
    monkeypatch.setattr(packed_linear, "FEWEST_ROWS", 4 if has_avx512 else 1)
    weight, bias = torch.randn(width, 96) / 10, torch.randn(width) if has_bias else None
    monkeypatch.setattr(packed_linear, "HAS_AVX512", has_avx512)
    layer = CombiningLinear(weight, bias, *suited(KERNELS, weight))
    rows, others = torch.randn(1, num_rows, 96), torch.randn(1, num_rows, width)
    before = rows.clone(), others.clone()
    with torch.inference_mode():
        product = linear(rows, weight, bias)
        torch.testing.assert_close(layer.swish(rows), silu(product), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.times(rows, others), product * others, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.plus(rows, others), product + others, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer(rows), product, rtol=1e-5, atol=1e-5)
    assert torch.equal(rows, before[0])
    assert torch.equal(others, before[1])


@needs_kernels
def test_a_kernel_that_does_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNELS is not None
    pack, multiply, _ = KERNELS

    def without_swish(
        rows: torch.Tensor, packed: torch.Tensor, bias: object, _: str, *rest: object
    ) -> object:
        return multiply(rows, packed, bias, "none", *rest)

    monkeypatch.setattr(combining_linear, "find_kernels", lambda: (pack, without_swish))
    assert find_combining_kernels() is None


def test_without_packed_products_there_are_none_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining_linear, "find_kernels", lambda: None)
    assert find_combining_kernels() is None
