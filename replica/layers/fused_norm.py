"""Families' own RMS norms, replaced by shorter ones where both give the same.

A decode step has two norms a layer, or four, each a handful of operations on few numbers: what they cost is
their number, not their work. In float32 on CPU some are done in place and nothing is converted; elsewhere
torch's own norm makes the same operations in one call. In float32 on CPU the same is the same bits. On a card
torch's norm is a kernel of its own, which adds the squares up in another order: there it is the same within
the last bits. In half precision families round twice, before the weight and after it, and torch's norm once:
as near to the norm as two roundings is the same there, or no model with weights of its own would have a norm
in one call.
Knows torch modules; knows neither steps nor pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

EPSILON_NAMES = ("variance_epsilon", "eps")
PROBE_ROWS = 8
MOST_ROUNDINGS = 2
# In float32, for another order of sums: of squares, so nothing cancels, and the root halves what is off.
MOST_LAST_BITS = 8


class InPlaceNorm(nn.Module):
    """RMS norm over the last dimension, float32, for inference only."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self._factor = weight.detach()  # the same memory, found without `Module.__getattr__`
        self.epsilon = epsilon

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Without what torch does around a module's forward; hooks are not called."""
        return self.forward(rows)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = (rows * rows).mean(-1, keepdim=True).add_(self.epsilon).rsqrt_()
        return (rows * scale).mul_(self._factor)


@dataclass(frozen=True, slots=True)
class NormNumbers:
    """All that an RMS norm is, for whoever computes it otherwise."""

    weight: nn.Parameter  # (width,), the norm's own
    epsilon: float


def numbers_of(norm: nn.Module | None) -> NormNumbers | None:
    """Of what `fuse_norms` puts in norms' places; None of anything else, which may compute otherwise."""
    if isinstance(norm, InPlaceNorm):
        return NormNumbers(norm.weight, norm.epsilon)
    if (
        type(norm) is nn.RMSNorm
        and norm.weight is not None
        and norm.eps is not None
        and norm.weight.dim() == 1
    ):
        return NormNumbers(norm.weight, norm.eps)
    return None


def fuse_norms(model: nn.Module) -> int:
    """Replace what is an RMS norm in place; how many. Weights are shared, not copied."""
    count = 0
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            fused = None if child is None else _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(norm: nn.Module) -> nn.Module | None:
    """What takes this one's place; None if it is no RMS norm, or one that computes otherwise."""
    numbers = _numbers_of_family_norm(norm)
    if numbers is None:
        return None
    weight, epsilon = numbers.weight, numbers.epsilon
    candidates = [_torchs(weight, epsilon)]
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        candidates.insert(0, InPlaceNorm(weight, epsilon))
    return next((each.train(norm.training) for each in candidates if _agree(norm, each, weight)), None)


def _numbers_of_family_norm(norm: nn.Module) -> NormNumbers | None:
    """None of what is not called an RMS norm, is torch's already, or is listened to."""
    is_family_norm = type(norm).__name__.endswith("RMSNorm") and not isinstance(norm, nn.RMSNorm)
    if not is_family_norm or norm._forward_hooks or norm._forward_pre_hooks:
        return None
    weight = norm._parameters.get("weight")
    epsilon = next((getattr(norm, name) for name in EPSILON_NAMES if hasattr(norm, name)), None)
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    return NormNumbers(weight, epsilon)


def _torchs(weight: nn.Parameter, epsilon: float) -> nn.Module:
    norm = nn.RMSNorm(weight.shape[0], eps=epsilon, device="meta")
    norm.weight = weight
    return norm


def _agree(norm: nn.Module, fused: nn.Module, weight: nn.Parameter) -> bool:
    """The same on rows of very different sizes: one of zeros, one so small that epsilon decides."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-4, 3, PROBE_ROWS)[:, None] * (torch.arange(PROBE_ROWS) > 0)[:, None]
    rows = torch.randn(1, PROBE_ROWS, weight.shape[0], generator=generator) * scales
    rows = rows.to(weight.device, weight.dtype)
    with torch.inference_mode():
        own, ours = norm(rows), fused(rows)
    return is_same(own, ours, is_card=weight.device.type != "cpu")


def is_same(own: torch.Tensor, ours: torch.Tensor, *, is_card: bool) -> bool:
    """Whether two ways to a norm differ by no more than how they round and add up."""
    if own.dtype == torch.float32 and not is_card:
        return torch.equal(own, ours)
    kind = torch.finfo(own.dtype)
    most = MOST_LAST_BITS if own.dtype == torch.float32 else MOST_ROUNDINGS
    return torch.allclose(own, ours, rtol=most * kind.eps, atol=kind.smallest_normal)
