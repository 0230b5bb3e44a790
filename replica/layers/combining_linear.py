"""Packed linear layers that do one more elementwise step on their product while it is at hand.

A decode's elementwise steps are few numbers each, but after every product they are called with cold caches:
oneDNN does the activation of a gate, the product with it, or the addition of the residual on each tile it has
just computed (its "post-ops"). 132M at batch 32: 2 of 95 ms for an MLP's activation and product alone.

Knows torch modules; knows neither steps nor pages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear, silu

from replica.layers.packed_linear import (
    EXPECTED_ROWS,
    HAS_AVX512,
    NO_SCALARS,
    Multiply,
    Pack,
    PackedLinear,
    find_kernels,
    is_better_as_loaded,
)

# Product of rows and packed weight, combined with a tensor of its shape: (rows, others, weight, bias, how).
Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, str], torch.Tensor]

Kernels = tuple[Pack, Multiply, Combine]


class CombiningLinear(PackedLinear):
    """A packed layer with post-ops. All tensors are (1, rows, features), at least one row."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pack: Pack,
        multiply: Multiply,
        combine: Combine,
    ) -> None:
        super().__init__(weight, bias, pack, multiply)
        self._combine = combine

    def swish(self, rows: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""
        count = rows.shape[1]
        if count >= self._fewest_rows:
            return self._multiply(rows, self.weight, self.bias, "swish", NO_SCALARS, "")
        product = self._multiply(self._repeated(rows), self.weight, self.bias, "swish", NO_SCALARS, "")
        return product[:, :count]

    def times(self, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The product times `factors`, which are as large."""
        return self._combined(rows, factors, "mul")

    def plus(self, rows: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        """The product plus `terms`, which are as large."""
        return self._combined(rows, terms, "add")

    def _combined(self, rows: torch.Tensor, others: torch.Tensor, how: str) -> torch.Tensor:
        count = rows.shape[1]
        if count >= self._fewest_rows:
            return self._combine(rows, others, self.weight, self.bias, how)
        combined = self._combine(self._repeated(rows), self._repeated(others), self.weight, self.bias, how)
        return combined[:, :count]

    def _repeated(self, rows: torch.Tensor) -> torch.Tensor:
        """At least as many rows as the kernel wants (`packed_linear.FEWEST_ROWS`)."""
        return torch.cat([rows] * -(-self._fewest_rows // rows.shape[1]), dim=1)


def suited(kernels: Kernels, weight: torch.Tensor) -> Kernels:
    """The kernels for this weight, (outputs, inputs), on this machine: not always oneDNN's.

    With AVX2 the activation as a post-op takes longer than by itself (512 rows, 3072 x 768: 51 ms for 39,
    `python -m benchmarks.products`).
    """
    if HAS_AVX512:
        return kernels
    pack, multiply, combine = _AS_LOADED if is_better_as_loaded(weight) else kernels
    return pack, _with_silu_apart(multiply), combine


def _with_silu_apart(multiply: Multiply) -> Multiply:
    def product(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: str, *rest: object
    ) -> torch.Tensor:
        plain: torch.Tensor = multiply(rows, weight, bias, "none", *rest)
        return silu(plain, inplace=True) if how == "swish" else plain

    return product


def _combine_as_loaded(
    rows: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: str
) -> torch.Tensor:
    product = linear(rows, weight, bias)
    return product.mul_(others) if how == "mul" else product.add_(others)


# torch's own, in the places of oneDNN's.
_AS_LOADED: Kernels = (
    lambda weight, _num_rows: weight,
    lambda rows, weight, bias, *_: linear(rows, weight, bias),
    _combine_as_loaded,
)


def find_combining_kernels() -> Kernels | None:
    """oneDNN's reorder, product and product with post-ops; None where they are not to be had.

    Private names, as in `packed_linear.find_kernels`, tried in the same manner.
    """
    kernels = find_kernels()
    if kernels is None:
        return None
    pack, multiply = kernels
    try:
        combine: Combine = torch.ops.mkldnn._linear_pointwise.binary
        weight, bias = torch.arange(-32.0, 32.0).view(4, 16), torch.arange(4.0)
        layer = CombiningLinear(weight, bias, pack, multiply, combine)
        packed = pack(weight, EXPECTED_ROWS)
        for num_rows in (1, 5):
            rows = torch.arange(16.0 * num_rows).view(1, num_rows, 16)
            others = torch.arange(4.0 * num_rows).view(1, num_rows, 4)
            product = nn.functional.linear(rows, weight, bias)
            if not torch.equal(combine(rows, others, packed, bias, "add"), product + others):
                return None
            if not torch.equal(combine(rows, others, packed, bias, "mul"), product * others):
                return None
            small = rows / 1024
            expected = silu(nn.functional.linear(small, weight, bias))
            if not torch.allclose(layer.swish(small), expected, rtol=1e-5, atol=1e-6):
                return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return pack, multiply, combine
