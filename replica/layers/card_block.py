"""Families' own decoder layers, computed on cards by four products, four kernels of rows and the attention.

A decode step reads every weight for a few rows. Beside that the rows themselves are nothing, but each
operation on them waits for the one before it and leaves the memory idle meanwhile, and a family's own code
has 18 to 46 of them in a layer. Of the layer that most families share (`layer_parts.py`)

    norm                                  one kernel
    query, key, value                     one product
    their norms, where there are; rotary  one kernel, in place
    attention
    out                                   one product
    + x, norm                             one kernel, which keeps the sum
    gate, up                              one product
    silu(gate) * up                       one kernel
    down, + x                             one product, which adds

Taken only where it answers as the family's own layer does (`layer_swap.py`). `decoder_block.py` is for CPUs.
Knows torch modules; knows neither steps nor pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from replica.attention.interface import attend
from replica.attention.triton_paged import DTYPES
from replica.layers.fused_norm import NormNumbers, numbers_of
from replica.layers.layer_parts import Parts, joined
from replica.layers.layer_swap import Attending, swap_layers
from replica.layers.triton_rows import HeadNorms, TritonRows


class CardBlock(nn.Module):
    """Takes a decoder layer's place, for inference only; attends under its own name."""

    _head_weights: torch.Tensor | None

    def __init__(self, parts: Parts, attending: Attending, kernels: TritonRows) -> None:
        """Raises ValueError for norms that are not plain RMS norms, and for attention with sinks."""
        super().__init__()
        if attending.sinks is not None:
            raise ValueError("sinks belong to a layer that has other parts, too")
        self._attending, self._kernels = attending, kernels
        self.before_attention = _Norm(_numbers_of(parts.before_attention))
        self.before_mlp = _Norm(_numbers_of(parts.before_mlp))
        self.qkv, self.gate_up = _joined(*parts.qkv), _joined(parts.gate, parts.up)
        self.out, self.down = (_Product(each.weight, each.bias) for each in (parts.out, parts.down))
        head_weights = None
        self._head_epsilon = 0.0
        if parts.head_norms is not None:
            self._head_epsilon = parts.head_norms[0].epsilon
            head_weights = torch.stack([norm.weight.detach() for norm in parts.head_norms])
        self.register_buffer("_head_weights", head_weights, persistent=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **__: Any,
    ) -> torch.Tensor:
        """hidden_states (1, T, width); position_embeddings: cosines and sines, each (1, T, dim)."""
        kernels, given = self._kernels, hidden_states[0]
        normed = kernels.norm(given, self.before_attention.weight, self.before_attention.epsilon)
        attended = self.out(self._attended(normed, *position_embeddings))
        rows, normed = kernels.add_norm(given, attended, self.before_mlp.weight, self.before_mlp.epsilon)
        return self.down.add_to(rows, kernels.swish_product(self.gate_up(normed)))[None]

    def _attended(self, normed: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(T, heads * dim)"""
        to = self._attending
        heads: torch.Tensor = self.qkv(normed).view(normed.shape[0], -1, to.dim)
        norms = None if self._head_weights is None else HeadNorms(self._head_weights, self._head_epsilon)
        self._kernels.turn(heads, to.heads, to.kv_heads, cosines[0], sines[0], norms)
        return attend(self, to.call(heads)).flatten(1)


class _Norm(nn.Module):
    """What a kernel is told; computes nothing."""

    def __init__(self, numbers: NormNumbers) -> None:
        super().__init__()
        self.weight, self.epsilon = numbers.weight, numbers.epsilon


class _Product(nn.Module):
    """A linear layer that is nobody's `nn.Linear`: what replaces those leaves it alone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Both are parameters, and kept: whoever gives them another type changes them here."""
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(T, inputs) to (T, outputs)"""
        return linear(rows, self.weight, self.bias)

    def add_to(self, totals: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`totals` (T, outputs), changed: the product of `rows` is added before it is rounded."""
        totals.addmm_(rows, self.weight.t())
        return totals if self.bias is None else totals.add_(self.bias)


def _joined(*layers: nn.Linear) -> _Product:
    weight, bias = joined([(each.weight.detach(), each.bias) for each in layers])
    return _Product(_parameter(weight), None if bias is None else _parameter(bias.detach()))


def _parameter(numbers: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(numbers, requires_grad=False)


def _numbers_of(norm: nn.Module) -> NormNumbers:
    numbers = numbers_of(norm)
    if numbers is None:
        raise ValueError(f"{type(norm).__name__} is no plain RMS norm")
    return numbers


def fuse_blocks(model: nn.Module, run: Callable[[], object]) -> int:
    """Replace what are decoder layers of that kind in place; how many. Where Triton's kernels run.

    run: a forward of the model over a few tokens at positions from the first to the last it will be given,
    to see how its layers are called. Weights are put together, and freed, layer by layer, unless somebody
    else has them; while a layer is compared, in float32, it takes four times its memory.
    """
    kernels = TritonRows()

    def build(parts: Parts, attending: Attending) -> nn.Module:
        # What the last layer left is of other sizes than what this one takes, and a card may be shared.
        torch.cuda.empty_cache()
        return CardBlock(parts, attending, kernels)

    return swap_layers(model, run, _can_take, build)


def _can_take(layer: nn.Linear) -> bool:
    return type(layer) is nn.Linear and layer.weight.dtype in DTYPES and layer.weight.numel() > 0
