"""What a decoder layer does to its rows between two products, by Triton kernels: one launch each.

For CUDA devices; under `TRITON_INTERPRET=1` the same kernels run on a CPU, slowly, for tests. Nothing is read
back, and what is launched depends on shapes alone, so that a decode step can be recorded. Triton is imported
when this is made, so that who serves without it need not have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replica.attention.triton_paged import on_device

# Numbers a program computes where any part of a row will do: eight a thread, sixteen bytes in half precision,
# the widest load there is.
NUMBERS, WARPS = 1024, 4
# A norm needs its whole row: sixteen numbers a thread, as far as there are warps.
NORM_NUMBERS_PER_WARP, MOST_WARPS = 512, 16


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of queries and of keys."""

    weights: torch.Tensor  # (2, dim)
    epsilon: float


class TritonRows:
    """Rows are (T, width), T at least 1, and contiguous or made so. float32, float16 or bfloat16."""

    def __init__(self, kernels: Any = None) -> None:
        """kernels: like `row_kernels`, which is imported where none are given."""
        if kernels is None:
            from replica.layers import row_kernels

            kernels = row_kernels
        self._kernels = kernels

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMS norms, as large."""
        return self._norm(rows.contiguous(), None, weight, epsilon)[1]

    def add_norm(
        self, rows: torch.Tensor, terms: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and the RMS norms of the sum as rounded."""
        return self._norm(rows.contiguous(), terms.contiguous(), weight, epsilon)

    def _norm(
        self, rows: torch.Tensor, terms: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty_like(rows)
        total = rows if terms is None else torch.empty_like(rows)
        lanes = power_of_two(rows.shape[1])
        with on_device(rows.device):
            self._kernels.norm[(rows.shape[0],)](
                normed,
                total,
                rows,
                rows if terms is None else terms,
                weight,
                epsilon,
                WIDTH=rows.shape[1],
                LANES=lanes,
                HAS_TERMS=terms is not None,
                num_warps=norm_warps(lanes),
            )
        return total, normed

    def turn(
        self,
        heads: torch.Tensor,
        num_queries: int,
        num_keys: int,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        norms: HeadNorms | None,
    ) -> None:
        """Rotary embedding of the first `num_queries + num_keys` of heads (T, heads, dim), in place.

        cosines, sines: (T, dim). norms: of queries and keys, before they are turned. Raises ValueError where
        only a part of each head is to be turned, or a head has no halves.
        """
        num_tokens, num_heads, dim = heads.shape
        if dim % 2 or cosines.shape != (num_tokens, dim) or sines.shape != cosines.shape:
            raise ValueError(f"angles {tuple(cosines.shape)} for heads {tuple(heads.shape)}")
        if not heads.is_contiguous():
            raise ValueError("heads that are changed in place must be contiguous")
        turned = num_queries + num_keys
        lanes, tile = head_tile(dim, turned)
        with on_device(heads.device):
            self._kernels.turn[(num_tokens, -(-turned // tile))](
                heads,
                heads if norms is None else norms.weights,
                cosines.contiguous(),
                sines.contiguous(),
                0.0 if norms is None else norms.epsilon,
                QUERIES=num_queries,
                TURNED=turned,
                ALL=num_heads,
                DIM=dim,
                LANES=lanes,
                HEADS=tile,
                HAS_NORMS=norms is not None,
                num_warps=WARPS,
            )

    def swish_product(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the first half of each row, times its second half: (T, width / 2)."""
        gate_up = gate_up.contiguous()
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_tokens, width)
        lanes = min(NUMBERS, power_of_two(width))
        with on_device(gate_up.device):
            self._kernels.swish_product[(num_tokens, -(-width // lanes))](
                out, gate_up, WIDTH=width, LANES=lanes, num_warps=WARPS
            )
        return out


def norm_warps(lanes: int) -> int:
    return max(1, min(MOST_WARPS, lanes // NORM_NUMBERS_PER_WARP))


def head_tile(dim: int, num_heads: int) -> tuple[int, int]:
    """Lanes of half a head, and how many heads a program turns: powers of two."""
    lanes = power_of_two(dim // 2)
    return lanes, max(1, min(NUMBERS // lanes, power_of_two(num_heads)))


def power_of_two(count: int) -> int:
    """The first that is not less."""
    return 1 << (count - 1).bit_length()
