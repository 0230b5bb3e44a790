"""The rotary embedding of a step's queries and keys, in place.

All layers of a kind are given the same cosines and sines in a step: what is made of them is made once.
Half of each head is turned against the other, as in all families but those that pair neighbours.
"""

from __future__ import annotations

import torch


class Rotary:
    """Shared by the layers of a model. Engine thread only."""

    def __init__(self) -> None:
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None  # held: no other can be taken for them
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def turn(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """`heads` (T, heads, dim), changed. cosines, sines: (1, T, dim), the same tensors in each layer."""
        given = self._given
        if given is None or given[0] is not cosines or given[1] is not sines:
            signed = sines[0].clone()
            signed[:, : signed.shape[1] // 2].neg_()
            self._given, self._factors = (cosines, sines), (cosines[0][:, None], signed[:, None])
        assert self._factors is not None
        of_own, of_other = self._factors
        others = heads.roll(heads.shape[2] // 2, 2).mul_(of_other)
        heads.mul_(of_own).add_(others)
