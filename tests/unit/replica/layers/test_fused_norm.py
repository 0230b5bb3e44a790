"""A family's RMS norm is replaced only by the same: to the bit, or in half precision to two roundings."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from replica.layers.fused_norm import InPlaceNorm, fuse_norms, is_same


class LateRMSNorm(Qwen3RMSNorm):  # type: ignore[misc]
    """Looks the same, and puts epsilon where torch does not."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        out: torch.Tensor = self.weight * (hidden_states / root)
        return out


def model_with(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return nn.Sequential(nn.Sequential(norm)).eval()


def test_a_replaced_norm_gives_the_same_bits_with_the_same_weight() -> None:
    norm = Qwen3RMSNorm(96)
    model = model_with(norm)
    rows = torch.randn(1, 5, 3, 96)
    expected = model(rows)
    assert fuse_norms(model) == 1
    assert torch.equal(model(rows), expected)
    (fused,) = (module for module in model.modules() if isinstance(module, InPlaceNorm))
    assert fused.weight is norm.weight
    assert list(model.parameters()) == [norm.weight]
    assert fuse_norms(model) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_one_rounding_takes_the_place_of_two(dtype: torch.dtype) -> None:
    """Nearer to the norm than the family's own, with weights that are not one."""
    norm = Qwen3RMSNorm(96)
    model = model_with(norm).to(dtype)
    rows = torch.randn(1, 500, 96).to(dtype)
    own = model(rows).double()
    assert fuse_norms(model) == 1
    wide = rows.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()
    ours = model(rows).double()
    assert (ours - exact).abs().mean() < (own - exact).abs().mean()
    assert (
        (ours - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
    ).all()


@pytest.mark.parametrize("width", [96, 4096])
def test_on_a_card_sums_in_another_order_are_the_same_in_float32(width: int) -> None:
    """Torch's norm is one kernel there; to the bit no layer in float32 would have a norm in one call."""
    torch.manual_seed(0)
    rows, weight = torch.randn(8, width), torch.randn(width)
    squares = rows.pow(2)

    def normed(sums: torch.Tensor) -> torch.Tensor:
        return rows * (sums[:, None] / width + 1e-6).rsqrt() * weight

    one_by_one = reduce(torch.add, squares.unbind(-1))  # no kernel adds up as badly
    own, ours = normed(squares.sum(-1)), normed(one_by_one)
    assert not torch.equal(own, ours)
    assert is_same(own, ours, is_card=True)
    assert not is_same(own, ours, is_card=False)
    assert not is_same(own, normed(squares.sum(-1) + 1e-5 * width), is_card=True), "another epsilon"


def test_the_rows_are_left_as_they_were() -> None:
    model = model_with(Qwen3RMSNorm(96))
    assert fuse_norms(model) == 1
    rows = torch.randn(1, 5, 96)
    before = rows.clone()
    model(rows)
    assert torch.equal(rows, before)


def test_torchs_norm_takes_its_place_where_the_shorter_one_does_not_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InPlaceNorm, "forward", lambda self, rows: rows)
    model = model_with(Qwen3RMSNorm(96))
    assert fuse_norms(model) == 1
    assert any(isinstance(module, nn.RMSNorm) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Gemma2RMSNorm, LateRMSNorm])
def test_a_norm_that_computes_otherwise_stays(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """Gemma scales by one plus its weight."""
    norm = kind(96)
    model = model_with(norm).to(dtype)
    assert fuse_norms(model) == 0
    assert norm in list(model.modules())


def test_what_somebody_listens_to_stays() -> None:
    norm = Qwen3RMSNorm(96)
    norm.register_forward_hook(lambda *_: None)
    assert fuse_norms(model_with(norm)) == 0
