"""Families' own decoder layers, computed with fewer and larger operations where that only changes rounding.

In a decode every operation between two products finds cold caches: the weights that passed have taken them.
What counts is how many there are. Of the layer that most families share (`layer_parts.py`)

    x = x + out(attention(rotary(norm(q)), rotary(norm(k)), v))    q, k, v of norm(x); q, k not always normed
    x = x + down(silu(gate) * up)                                  gate, up of norm(x)

queries and keys are normed and turned together and in place; activation, product and residual additions are
done by the matrix products (`combining_linear.py`), and their weights have taken in those of the norms before
them. A step of the 132M model at batch 32 takes 4 of 98 ms less, the 9M's at batch 1 an eighth less.

Float32 on CPUs; `card_block.py` is for cards. Taken only where it answers as the family's own layer does
(`layer_swap.py`). Knows torch modules; knows neither steps nor pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from replica.attention.interface import attend
from replica.layers.combining_linear import CombiningLinear, Kernels, find_combining_kernels, suited
from replica.layers.fused_norm import InPlaceNorm
from replica.layers.layer_parts import Parts, joined
from replica.layers.layer_swap import Attending, swap_layers
from replica.layers.packed_linear import PackedLinear, can_pack
from replica.layers.rotary import Rotary

logger = logging.getLogger(__name__)

Norm = Callable[[torch.Tensor], torch.Tensor]


class DecoderBlock(nn.Module):
    """Takes a decoder layer's place. Float32 on CPU, inference only; attends under its own name."""

    def __init__(self, parts: Parts, attending: Attending, kernels: Kernels, rotary: Rotary) -> None:
        super().__init__()
        pack, multiply, _ = kernels
        self._attending = attending
        self._rotary = rotary
        before_attention, before_mlp = parts.before_attention, parts.before_mlp
        qkv = joined([_taking_in(before_attention, each) for each in parts.qkv])
        gate, up = _taking_in(before_mlp, parts.gate), _taking_in(before_mlp, parts.up)
        out, down = ((each.weight, each.bias) for each in (parts.out, parts.down))
        # Modules, for whoever walks the model; what a step calls is found without `Module.__getattr__`.
        self.qkv = PackedLinear(*qkv, pack, multiply)
        self.out, self.gate, self.up, self.down = (
            CombiningLinear(weight, bias, *suited(kernels, weight)) for weight, bias in (out, gate, up, down)
        )
        self._norm_before_attention, self._norm_before_mlp = _norm(before_attention), _norm(before_mlp)
        self._project, self._plus_out = self.qkv.forward, self.out.plus
        self._swish_gate, self._times_up, self._plus_down = self.gate.swish, self.up.times, self.down.plus
        self._num_turned = attending.heads + attending.kv_heads
        self._head_weights: torch.Tensor | None = None
        self._head_epsilon = 0.0
        if parts.head_norms is not None:
            self._head_epsilon = parts.head_norms[0].epsilon
            counts = (attending.heads, attending.kv_heads)
            weights = zip(parts.head_norms, counts, strict=True)
            self._head_weights = torch.cat([norm.weight.detach().expand(n, -1) for norm, n in weights])

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **__: Any,
    ) -> torch.Tensor:
        """hidden_states (1, T, width); position_embeddings: cosines and sines, each (1, T, dim)."""
        normed = self._norm_before_attention(hidden_states)
        rows = self._plus_out(self._attended(normed, *position_embeddings), hidden_states)
        normed = self._norm_before_mlp(rows)
        return self._plus_down(self._times_up(normed, self._swish_gate(normed)), rows)

    def _attended(self, normed: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(1, T, heads * dim)"""
        to = self._attending
        heads = self._project(normed).view(normed.shape[1], -1, to.dim)
        turned = heads[:, : self._num_turned]
        if self._head_weights is not None:
            scale = (turned * turned).mean(-1, keepdim=True).add_(self._head_epsilon).rsqrt_()
            turned = turned.mul_(scale).mul_(self._head_weights)
        self._rotary.turn(turned, cosines, sines)
        return attend(self, to.call(heads)).flatten(1)[None]


def fuse_blocks(model: nn.Module, run: Callable[[], object]) -> int:
    """Replace what are decoder layers of that kind in place; how many.

    run: a forward of the model over a few tokens at positions from the first to the last it will be given,
    to see how its layers are called. Weights are packed, and freed layer by layer unless somebody else has
    them.
    """
    kernels = find_combining_kernels()
    if kernels is None:
        logger.info("oneDNN's products with post-ops are missing; decoder layers stay as loaded")
        return 0
    rotary = Rotary()
    return swap_layers(
        model, run, can_pack, lambda parts, attending: DecoderBlock(parts, attending, kernels, rotary)
    )


def _norm(norm: nn.Module) -> Norm:
    """What is left to do before products that have taken this norm's weight in; itself if they cannot."""
    if not isinstance(norm, InPlaceNorm):
        return norm.__call__
    of_sum = norm.epsilon * norm.weight.shape[0]

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return rows * (rows * rows).sum(-1, keepdim=True).add_(of_sum).rsqrt_()

    return normed


def _taking_in(norm: nn.Module, linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a product that takes what `_norm` gives; the root is of a sum, not of a mean."""
    weight = linear.weight.detach()
    if isinstance(norm, InPlaceNorm):
        weight = weight * (norm.weight.detach() * norm.weight.shape[0] ** 0.5)
    return weight, None if linear.bias is None else linear.bias.detach()
