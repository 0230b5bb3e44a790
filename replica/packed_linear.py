"""Linear layers whose weights are laid out once for oneDNN, where that is faster: float32 on CPU.

torch multiplies by a row-major weight and lays it out anew in every call; with few rows, as in a decode,
that takes as long as the multiplication. Laid out at load it is the same product, summed in another
order. Measured on one AVX-512 core (weights 768 x 2304, out of cache), torch 2.13:

    rows          1      8      32     512
    as loaded   0.55   0.85   1.73   18.6   ms
    packed      0.37   0.48   1.17   16.6

Knows torch modules; knows neither steps nor pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

logger = logging.getLogger(__name__)

# The layout depends on the rows it is told to expect: one for many is as good for few, not the reverse.
EXPECTED_ROWS = 512

# One or two rows take its kernels longer than four (132M: 29 and 35 ms a step, against 23), so that fewer
# are repeated; not where the weight is so small (1 MiB) that repeating them takes longer.
FEWEST_ROWS = 4
LARGE_WEIGHT = 1 << 18

Pack = Callable[[torch.Tensor, int], torch.Tensor]
Multiply = Callable[..., torch.Tensor]


_NO_SCALARS: list[float] = []


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight, for inference only."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, pack: Pack, multiply: Multiply) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # A plain attribute: `.weight.dtype` and `.weight.device` still answer, the rest is opaque, and a
        # buffer or parameter would be looked up through `Module.__getattr__` in every call.
        object.__setattr__(self, "weight", pack(linear.weight.detach(), EXPECTED_ROWS))
        object.__setattr__(self, "bias", linear.bias)
        self._multiply = multiply
        self._fewest_rows = FEWEST_ROWS if linear.weight.numel() >= LARGE_WEIGHT else 1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shape = rows.shape
        if len(shape) > 1 and shape[-2] >= self._fewest_rows:
            return self._multiply(rows, self.weight, self.bias, "none", _NO_SCALARS, "")
        return self._with_few(rows)

    def _with_few(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dim() < 2:
            return self._with_few(rows[None])[0]
        count = rows.shape[-2]
        if count == 0:
            return rows.new_zeros(*rows.shape[:-1], self.out_features)
        repeated = torch.cat([rows] * -(-self._fewest_rows // count), dim=-2)
        return self._multiply(repeated, self.weight, self.bias, "none", _NO_SCALARS, "")[..., :count, :]


def pack_linears(model: nn.Module) -> int:
    """Replace the model's float32 CPU `nn.Linear`s in place; how many. 0 where oneDNN is not to be had.

    Subclasses stay as they are: what they add is not known here. Each weight is packed and freed before
    the next, so memory grows only where a weight is shared (tied embeddings) and therefore not freed.
    """
    kernels = _kernels()
    if kernels is None:
        logger.info("oneDNN's packed product is missing; linear layers stay as loaded")
        return 0
    places = _linears(model)
    count = len(places)
    while places:
        linear, users = places.popitem()
        packed = PackedLinear(linear, *kernels).train(linear.training)
        for parent, name in users:
            setattr(parent, name, packed)
        del linear  # the last reference: its weight is freed before the next is packed
    return count


def _linears(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """What can be packed, and every place it is used in."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children() leaves a second use out
            if isinstance(child, nn.Linear) and _can_pack(child):
                places.setdefault(child, []).append((parent, name))
    return places


def _can_pack(linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        type(linear) is nn.Linear
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.numel() > 0
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def _kernels() -> tuple[Pack, Multiply] | None:
    """oneDNN's reorder and product.

    Not public names (torch's own compiler emits them; seen in torch 2.11 and 2.13), so they are tried
    once on a small input, at row counts on both sides of the expected, and left alone unless they behave.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        pack: Pack = torch.ops.mkldnn._reorder_linear_weight.default
        multiply: Multiply = torch.ops.mkldnn._linear_pointwise.default
        weight, bias = torch.arange(-32.0, 32.0).view(4, 16), torch.arange(4.0)
        packed = pack(weight, EXPECTED_ROWS)
        for num_rows in (1, 5):
            rows = torch.arange(16.0 * num_rows).view(1, num_rows, 16)
            # Small integers: exact in float32 in whatever order they are summed.
            for offset in (None, bias):
                expected = nn.functional.linear(rows, weight, offset)
                if not torch.equal(multiply(rows, packed, offset, "none", [], ""), expected):
                    return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return pack, multiply
