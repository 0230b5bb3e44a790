"""The function transformers calls for attention, and how it learns a model's layers.

Registered under a name of ours with no mask registered for it: transformers then builds no mask at
all, and models hand their query, key and value over as they are. Knows transformers' calling
convention; leaves the attending to a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cache.errors import ServingError
from replica.attention.backend import AttentionCall
from replica.attention.kv_pages import ATTRIBUTE, LayerPages, LayerShape

ATTENTION_NAME = "warmpath_paged"
PROBE_ATTRIBUTE = "_warmpath_probe"

# What a family may hand to its attention that changes scores in a way no backend here knows about.
UNSUPPORTED_ARGUMENTS = ("position_bias", "head_mask", "alibi")


class UnsupportedAttention(ServingError):
    """A layer attends in a way that no backend here computes: the model must be refused."""


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. Idempotent; process-wide."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def probed_layers(model: nn.Module) -> list[tuple[nn.Module, LayerShape]]:
    """Attention modules reached by the probing forward, in model order; takes the marks off again."""
    layers = []
    for module in model.modules():
        shape = module.__dict__.pop(PROBE_ATTRIBUTE, None)
        if shape is not None:
            layers.append((module, shape))
    return layers


def forget(module: nn.Module) -> None:
    """Take off what an earlier probe or runner left on a module."""
    module.__dict__.pop(ATTRIBUTE, None)
    module.__dict__.pop(PROBE_ATTRIBUTE, None)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of one step. query (1, heads, T, key_dim), key and value (1, kv_heads, T, dim).

    Returns (1, T, heads, value_dim). A module without pages is being probed: its shapes are noted and
    the result is zeros. Raises UnsupportedAttention while probing.
    """
    pages: LayerPages | _Recorder | None = module.__dict__.get(ATTRIBUTE)
    if pages is None:
        has_sinks, window = s_aux is not None, sliding_window or None
        return _probe(module, query, key, value, attention_mask, others, has_sinks, window), None
    call = AttentionCall(
        query=query[0],
        key=key[0],
        value=value[0],
        scale=scaling if scaling is not None else query.shape[3] ** -0.5,
        # From the call, never from the config: families with mixed layers pass None for the full ones.
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
    )
    return pages.attend(call)[None], None


def attend(module: nn.Module, call: AttentionCall) -> torch.Tensor:
    """As `paged_attention`, for layers of our own: (T, heads, value_dim), without the batch axis."""
    pages: LayerPages | _Recorder | None = module.__dict__.get(ATTRIBUTE)
    if pages is None:
        return _probe(
            module,
            call.query[None],
            call.key[None],
            call.value[None],
            None,
            {},
            call.sinks is not None,
            call.window,
        )[0]
    return pages.attend(call)


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[AttentionCall]]:
    """What the module hands to its attention meanwhile. It is answered with its value's first heads.

    For comparing two modules that should attend alike; the module must have no pages yet.
    """
    recorder = _Recorder()
    module.__dict__[ATTRIBUTE] = recorder
    try:
        yield recorder.calls
    finally:
        del module.__dict__[ATTRIBUTE]


class _Recorder:
    """Hangs where a layer's pages would."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        times = call.query.shape[0] // call.value.shape[0]
        return call.value.repeat_interleave(times, dim=0).transpose(0, 1)


def _probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    others: dict[str, Any],
    has_sinks: bool,
    window: int | None,
) -> torch.Tensor:
    kind = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedAttention(f"{kind} builds an attention mask of its own")
    given = [name for name in UNSUPPORTED_ARGUMENTS if others.get(name) is not None]
    if given:
        raise UnsupportedAttention(f"{kind} adds {', '.join(given)} to its scores")
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise UnsupportedAttention(f"{kind} is not causal: later tokens change what earlier ones see")
    if PROBE_ATTRIBUTE in module.__dict__:
        raise UnsupportedAttention(f"{kind} attends more than once per layer")
    module.__dict__[PROBE_ATTRIBUTE] = LayerShape(
        key.shape[1], key.shape[3], value.shape[3], has_sinks, window
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
