"""A linear layer's product in fewer bits than float32: half or a quarter of the bytes, and of the time.

Two kinds, each with what it makes of weights and rows, so that whoever bounds its error can look at what
was lost rather than at what could be:

    bfloat16   8 significant bits of every number; summed in float32
    int8       a token's weights and a row's numbers in 127 steps up to the largest of them; summed exactly

Measured on one AVX-512 core, 768 x 32,000 weights out of cache, milliseconds: 32 rows 18.0 in float32, 9.5 in
bfloat16, 5.3 in int8; one row 7.8, 3.9, 2.5.

Knows weights and rows; knows neither tokens nor bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replica.layers.packed_linear import (
    EXPECTED_ROWS,
    FEWEST_ROWS,
    LARGE_WEIGHT,
    Multiply,
    Pack,
    find_kernels,
)

# Steps on either side of zero; rows are shifted by ROW_ZERO, because the kernel takes them without a sign.
STEPS = 127
ROW_ZERO = 128
# More terms could overflow the sum of int32 numbers.
WIDEST_INT8 = (1 << 31) // (2 * ROW_ZERO * STEPS)
# Numbers all smaller than this are rounded to zero, so that no step is too small to divide by.
_SMALLEST = 2.0**-100


@dataclass(frozen=True, slots=True)
class CoarseLogits:
    """A product, and what stood in for the rows in it."""

    values: torch.Tensor  # (rows, outputs) bfloat16; those of a row times its unit are its logits
    units: torch.Tensor | None  # (rows, 1) float32; None = all 1
    rows: torch.Tensor  # (rows, width) float32: what is left of the rows


class CoarseProduct(Protocol):
    """One layer's packed weight. Changes no state; float32 rows on CPU."""

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        """What is left of some outputs' weights, (outputs, width) float32."""

    def __call__(self, rows: torch.Tensor) -> CoarseLogits:
        """rows: (rows, width) float32, at least one. What comes of rows that are not numbers is not said."""


# From weight (outputs, width) and bias. Raises ValueError or RuntimeError for layers it is not made for.
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], CoarseProduct]


class Bfloat16Product:
    """Weight, bias and rows rounded to bfloat16."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, pack: Pack, multiply: Multiply
    ) -> None:
        self._weight = pack(weight.to(torch.bfloat16), EXPECTED_ROWS)
        self._bias = None if bias is None else bias.to(torch.bfloat16)
        self._multiply = multiply
        self._fewest_rows = FEWEST_ROWS if weight.numel() >= LARGE_WEIGHT else 1

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.bfloat16).float()

    def __call__(self, rows: torch.Tensor) -> CoarseLogits:
        rounded = rows.to(torch.bfloat16)
        left = rounded.float()
        if rows.shape[0] < self._fewest_rows:  # as in `PackedLinear`
            rounded = rounded.repeat(-(-self._fewest_rows // rows.shape[0]), 1)
        values = self._multiply(rounded, self._weight, self._bias, "none", [], "")[: rows.shape[0]]
        return CoarseLogits(values, None, left)


class Int8Product:
    """Weights in steps of their output's own size, rows in steps of theirs. Without bias."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pack: Callable[..., torch.Tensor],
        multiply: Callable[..., torch.Tensor],
    ) -> None:
        if bias is not None or weight.shape[1] > WIDEST_INT8:
            raise ValueError("a bias, or more terms than int32 can sum")
        parts: tuple[torch.Tensor, ...] = torch.split(weight, EXPECTED_ROWS)
        self._steps = torch.cat([_steps(part)[:, 0] for part in parts])
        self._weight = pack(torch.cat([_in_steps(part, _steps(part)).to(torch.int8) for part in parts]), None)
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        self._multiply = multiply

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        steps = _steps(weight)
        return _in_steps(weight, steps).mul_(steps)

    def __call__(self, rows: torch.Tensor) -> CoarseLogits:
        units = _steps(rows)
        rounded = _in_steps(rows, units)
        shifted = (rounded + ROW_ZERO).to(torch.uint8)
        values = self._multiply(
            shifted,
            1.0,
            ROW_ZERO,
            self._weight,
            self._steps,
            self._zeros,
            None,
            1.0,
            0,
            torch.bfloat16,
            "none",
            [],
            "",
        )
        return CoarseLogits(values, units, rounded.mul_(units))


def _steps(numbers: torch.Tensor) -> torch.Tensor:
    """How large a step is in each row, (rows, 1) float32."""
    return numbers.abs().amax(dim=-1, keepdim=True).float().clamp_(min=_SMALLEST).div_(STEPS)


def _in_steps(numbers: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    # The quotient's own rounding must not lead beyond the last step.
    return numbers.float().div(steps).round_().clamp_(-STEPS, STEPS)


def find_bfloat16() -> MakeProduct | None:
    """oneDNN's reorder and product, if they take bfloat16 and sum it in float32; None otherwise.

    Private names, as in `packed_linear`. Processors without bfloat16 instructions imitate them, correctly
    and slowly: whether it is worth it is measured.
    """
    kernels = find_kernels()
    if kernels is None:
        return None
    pack, multiply = kernels
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        # Of two parts that cancel but for the bias: sums kept in bfloat16 would stop growing at 256.
        halves = torch.cat([torch.ones(2048), -torch.ones(2048)])
        weight = torch.stack([torch.ones(4096), halves]).to(torch.bfloat16)
        bias = torch.tensor([0.0, 3.0], dtype=torch.bfloat16)
        packed = pack(weight, EXPECTED_ROWS)
        for num_rows in (1, 5):
            ones = torch.ones(num_rows, 4096, dtype=torch.bfloat16)
            product = multiply(ones, packed, bias, "none", [], "").float()
            if product.tolist() != [[4096.0, 3.0]] * num_rows:
                return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return lambda weight, bias: Bfloat16Product(weight, bias, pack, multiply)


def find_int8() -> MakeProduct | None:
    """oneDNN's product of unsigned and signed bytes, if it sums exactly; None otherwise.

    Private names again. Only where the processor multiplies bytes itself (VNNI): imitated, pairs of products
    are summed in 16 bits, which cannot hold the largest, or take a thousand times as long.
    """
    try:
        has_instructions: Callable[[], bool] = torch.cpu._is_vnni_supported
        if not has_instructions():
            return None
        pack: Callable[..., torch.Tensor] = torch.ops.onednn.qlinear_prepack.default
        multiply: Callable[..., torch.Tensor] = torch.ops.onednn.qlinear_pointwise.default
        if not _sums_exactly(pack, multiply):
            return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return lambda weight, bias: Int8Product(weight, bias, pack, multiply)


def _sums_exactly(pack: Callable[..., torch.Tensor], multiply: Callable[..., torch.Tensor]) -> bool:
    """On the largest numbers: of one sign, which 16 bits cannot hold, and cancelling but for the last."""
    width = 1040  # whose largest sum a float32 still holds
    of_one_sign = torch.full((width,), STEPS, dtype=torch.int8)
    cancelling = of_one_sign.clone()
    cancelling[1::2] = -STEPS
    cancelling[-1] = -STEPS + 3
    weight = torch.stack([of_one_sign, cancelling] * 8)
    steps, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
    packed = pack(weight, None)
    for num_rows in (1, 5):
        for number in (STEPS, -STEPS, 1):
            rows = torch.full((num_rows, width), number + ROW_ZERO, dtype=torch.uint8)
            arguments: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
            product = multiply(rows, 1.0, ROW_ZERO, packed, steps, zeros, *arguments)
            if product.tolist() != [[float(width * STEPS * number), 3.0 * number] * 8] * num_rows:
                return False
    return True
