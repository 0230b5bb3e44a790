"""What each kernel of rows should answer, in float64 of the numbers it is given, and whether it does.

Shared by the interpreter's tests and by those on a card.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from replica.layers.triton_rows import HeadNorms, TritonRows

CPU = torch.device("cpu")
EPSILON = 1e-5
# A card rounds to the nearest: half an epsilon at most, and what float32 makes of the sums before it.
NEAREST = 0.51
# Triton's interpreter cuts bfloat16 off instead.
CUT_OFF = 1.01
# Of float32 itself: `ex2.approx` and `rsqrt.approx` are right but for the last two bits.
FLOAT32_ERROR = 1e-5


class Rows:
    """Kernels on one device in one type, with seeded numbers."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, device: torch.device = CPU) -> None:
        self._kernels = TritonRows()
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def check_norm(self, num_tokens: int, width: int, size: float = 1.0) -> None:
        rows, weight = self._made(num_tokens, width) * size, self._made(width)
        normed = self._kernels.norm(rows, weight, EPSILON)
        self._agree(normed, _normed(rows.double(), weight.double()))

    def check_add_norm(self, num_tokens: int, width: int) -> None:
        rows, terms, weight = self._made(num_tokens, width), self._made(num_tokens, width), self._made(width)
        before = rows.clone(), terms.clone()
        total, normed = self._kernels.add_norm(rows, terms, weight, EPSILON)
        self._agree(total, rows.double() + terms.double())
        self._agree(normed, _normed(total.double(), weight.double()))
        assert torch.equal(rows, before[0]), "whoever has the rows still needs them"
        assert torch.equal(terms, before[1])

    def check_turn(
        self, num_tokens: int, num_queries: int, num_keys: int, dim: int, *, has_norms: bool
    ) -> None:
        heads = self._made(num_tokens, num_queries + 2 * num_keys, dim)
        angles = torch.randn(num_tokens, dim, generator=self._generator, dtype=torch.float64) * 100
        cosines, sines = (each.to(self._device, self._dtype) for each in (angles.cos(), angles.sin()))
        norms = HeadNorms(self._made(2, dim), EPSILON) if has_norms else None
        given, num_turned = heads.double(), num_queries + num_keys
        turned = given[:, :num_turned]
        if norms is not None:
            of_queries, of_keys = norms.weights.double()
            turned = torch.cat(
                [
                    _normed(turned[:, :num_queries], of_queries),
                    _normed(turned[:, num_queries:], of_keys),
                ],
                dim=1,
            )
        low, high = turned.chunk(2, dim=-1)
        own, other = cosines.double()[:, None], sines.double()[:, None]
        terms = turned * own, torch.cat([-high, low], dim=-1) * other
        self._kernels.turn(heads, num_queries, num_keys, cosines, sines, norms)
        sizes = terms[0].abs() + terms[1].abs()  # which may cancel
        self._agree(heads[:, :num_turned], terms[0] + terms[1], sizes)
        assert torch.equal(heads[:, num_turned:].double(), given[:, num_turned:]), "values are not turned"

    def check_swish_product(self, num_tokens: int, width: int, size: float = 1.0) -> None:
        gate_up = self._made(num_tokens, 2 * width) * size
        gate, up = gate_up.double().chunk(2, dim=-1)
        self._agree(self._kernels.swish_product(gate_up), silu(gate) * up)

    def _made(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def _agree(self, ours: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor | None = None) -> None:
        """Rounded once. sizes: of the terms of which each number is the sum; None: it is no sum."""
        assert ours.dtype == self._dtype
        kind = torch.finfo(self._dtype)
        cut_off = self._dtype == torch.bfloat16 and self._device.type == "cpu"
        rounding = (CUT_OFF if cut_off else NEAREST) * kind.eps
        allowed = rounding * exact.abs() + kind.smallest_normal
        allowed += FLOAT32_ERROR * (exact.abs() if sizes is None else sizes)
        worst = ((ours.double() - exact).abs() / allowed).max()
        assert worst <= 1, f"{float(worst):.2f} times what rounding once makes of it"


def _normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight
