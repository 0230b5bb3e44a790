"""A family's decoder layer, taken apart: its parts, by the names they have in nearly all families.

    x = x + out(attention(rotary(norm(q)), rotary(norm(k)), v))    q, k, v of norm(x); q, k not always normed
    x = x + down(silu(gate) * up)                                  gate, up of norm(x)

What has these names may compute otherwise all the same: `layer_swap.py` finds out. Knows torch modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from replica.layers.fused_norm import NormNumbers, numbers_of


@dataclass(frozen=True, slots=True)
class Parts:
    """A decoder layer's."""

    attention: nn.Module
    before_attention: nn.Module
    before_mlp: nn.Module
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]  # all with a bias, or none
    out: nn.Linear
    head_norms: tuple[NormNumbers, NormNumbers] | None  # of queries and of keys, with the same epsilon
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


def parts_of(layer: nn.Module, can_take: Callable[[nn.Linear], bool]) -> Parts | None:
    """None for a layer with other parts, with one that cannot be taken, or that somebody listens to."""
    own = layer._modules
    attention, mlp = own.get("self_attn"), own.get("mlp")
    before_attention, before_mlp = own.get("input_layernorm"), own.get("post_attention_layernorm")
    if attention is None or mlp is None or before_attention is None or before_mlp is None or _is_heard(layer):
        return None
    inside = attention._modules | mlp._modules

    def linear(name: str) -> nn.Linear | None:
        found = inside.get(name)
        return found if isinstance(found, nn.Linear) and can_take(found) else None

    query, key, value, out = linear("q_proj"), linear("k_proj"), linear("v_proj"), linear("o_proj")
    gate, up, down = linear("gate_proj"), linear("up_proj"), linear("down_proj")
    if not (query and key and value and out and gate and up and down):
        return None
    if len({each.bias is None for each in (query, key, value)}) > 1:
        return None
    head_norms = _head_norms(inside.get("q_norm"), inside.get("k_norm"))  # others show in the answers
    qkv = query, key, value
    return Parts(attention, before_attention, before_mlp, qkv, out, head_norms, gate, up, down)


def joined(
    layers: list[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One product's weight and bias for several layers', their outputs side by side."""
    biases = [bias for _, bias in layers if bias is not None]
    return torch.cat([weight for weight, _ in layers]), torch.cat(biases) if biases else None


def _head_norms(
    of_queries: nn.Module | None, of_keys: nn.Module | None
) -> tuple[NormNumbers, NormNumbers] | None:
    found = numbers_of(of_queries), numbers_of(of_keys)
    if found[0] is None or found[1] is None or found[0].epsilon != found[1].epsilon:
        return None
    return found[0], found[1]


def _is_heard(layer: nn.Module) -> bool:
    return any(each._forward_hooks or each._forward_pre_hooks for each in layer.modules())
