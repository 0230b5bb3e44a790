"""Coarse products lose what they say they lose; kernels that answer otherwise are not used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replica.layers import coarse_product, packed_linear
from replica.layers.coarse_product import MakeProduct, find_bfloat16, find_int8
from tests.fakes.layers import BFLOAT16, INT8, both, drawn, needs_bfloat16, needs_int8


@both
@pytest.mark.parametrize("num_rows", [1, 3, 4, 32])
@pytest.mark.parametrize("width", [1, 7, 257])
def test_it_is_the_product_of_what_is_left(make_product: MakeProduct, num_rows: int, width: int) -> None:
    weight, rows = drawn(64, width) * 0.02, drawn(num_rows, width, seed=1) * 30
    with torch.inference_mode():
        product = make_product(weight, None)
        coarse = product(rows)
    of_left = coarse.rows.double() @ product.rounded(weight).double().T
    logits = coarse.values.double() * (1.0 if coarse.units is None else coarse.units.double())
    terms = coarse.rows.double().abs() @ product.rounded(weight).double().abs().T
    assert logits.shape == (num_rows, 64)
    assert bool(((logits - of_left).abs() <= 2.0**-8 * of_left.abs() + 1e-5 * terms).all())


@both
def test_what_is_left_is_close_to_what_there_was(make_product: MakeProduct) -> None:
    """bfloat16 keeps 8 bits of each number, int8 127 steps up to the largest."""
    weight, rows = drawn(64, 256) * 0.02, drawn(5, 256, seed=1)
    with torch.inference_mode():
        product = make_product(weight, None)
        pairs = ((weight, product.rounded(weight)), (rows, product(rows).rows))
    for exact, left in pairs:
        allowed = exact.abs().amax(dim=-1) / (2 * 127) + 2.0**-9 * exact.abs().amax(dim=-1)
        assert bool(((exact - left).abs() <= allowed[:, None]).all())


@both
def test_a_weight_stored_in_less_is_rounded_alike(make_product: MakeProduct) -> None:
    stored, rows = (drawn(64, 32) * 0.02).to(torch.bfloat16), drawn(4, 32, seed=1)
    with torch.inference_mode():
        narrow, wide = (make_product(each, None)(rows) for each in (stored, stored.float()))
    assert torch.equal(narrow.values, wide.values)


@needs_bfloat16
def test_the_bias_is_added() -> None:
    assert BFLOAT16 is not None
    weight, bias = torch.ones(64, 4), torch.arange(64.0)
    with torch.inference_mode():
        assert torch.equal(BFLOAT16(weight, bias)(torch.ones(4, 4)).values[0].float(), 4.0 + bias)


@needs_int8
def test_int8_refuses_what_it_cannot_sum() -> None:
    assert INT8 is not None
    for weight, bias in (
        (torch.ones(64, 4), torch.ones(64)),
        (torch.ones(1, coarse_product.WIDEST_INT8 + 1), None),
    ):
        with pytest.raises(ValueError, match="int32"):
            INT8(weight, bias)


@needs_int8
def test_numbers_too_small_for_a_step_are_nothing() -> None:
    assert INT8 is not None
    with torch.inference_mode():
        coarse = INT8(torch.full((64, 8), 1e-38), None)(
            torch.stack([torch.zeros(8), torch.full((8,), 1e-39)])
        )
    assert not coarse.values.any()
    assert not coarse.rows.any()


@needs_bfloat16
@pytest.mark.parametrize("error", [1, 0.5])
def test_a_bfloat16_kernel_that_answers_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    real = torch.ops.mkldnn._linear_pointwise.default
    other = SimpleNamespace(
        default=lambda rows, *rest: real(rows, *rest) + error * (rows.dtype.itemsize == 2)
    )
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", other)
    assert packed_linear.find_kernels() is not None
    assert find_bfloat16() is None


@needs_int8
def test_an_int8_kernel_that_sums_in_16_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without VNNI: the sum of two products ends at the largest number there is."""
    real = torch.ops.onednn.qlinear_pointwise.default

    def saturating(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        product: torch.Tensor = real(rows, *rest)
        return product.clamp(max=rows.shape[1] * (1 << 14) / 2)

    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", SimpleNamespace(default=saturating))
    assert find_int8() is None


@pytest.mark.parametrize("has", [lambda: False, None])
def test_without_byte_instructions_there_is_no_int8(monkeypatch: pytest.MonkeyPatch, has: Any) -> None:
    """False where the processor has none; missing where torch does not say."""
    if has is None:
        monkeypatch.delattr(torch.cpu, "_is_vnni_supported")
    else:
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", has)
    assert find_int8() is None


def test_without_the_packed_product_there_is_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse_product, "find_kernels", lambda: None)
    assert find_bfloat16() is None
