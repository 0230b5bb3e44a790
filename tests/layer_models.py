"""Small networks whose decoder layers are replaced, and what they answer where each attends plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from replica.attention.kv_pages import ATTRIBUTE
from replica.layers.fused_norm import fuse_norms
from replica.models import model_probe
from tests.model_families import COMMON

FuseBlocks = Callable[[nn.Module, Callable[[], object]], int]

POSITIONS = (0, 1, 2, 3, 60, 250)
SETTINGS = {**COMMON, "vocab_size": 64}  # of tokens that nobody reads


class Attended:
    """Hangs where a layer's pages would; plain causal attention over what the step brings."""

    def attend(self, call: Any) -> torch.Tensor:
        group = call.query.shape[0] // call.key.shape[0]
        key, value = (each.repeat_interleave(group, dim=0) for each in (call.key, call.value))
        attended = nn.functional.scaled_dot_product_attention(
            call.query, key, value, is_causal=True, scale=call.scale
        )
        return attended.transpose(0, 1)


def model_of(model_type: str, **settings: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SETTINGS, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide a weight that is left out
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def logits(model: Any, num_tokens: int) -> torch.Tensor:
    """Of tokens at the last positions there are; every layer attends plainly."""
    for module, _ in model_probe.probe_layers(model):
        module.__dict__[ATTRIBUTE] = Attended()
    tokens = torch.arange(3, 3 + num_tokens)[None]
    with torch.inference_mode():
        return model_probe.run(model, tokens, torch.arange(256 - num_tokens, 256)[None])


def fuse(model: Any, fuse_blocks: FuseBlocks) -> int:
    """Replace its norms and then its layers, as a runner does; how many layers."""
    fuse_norms(model)
    return fuse_blocks(model, lambda: model_probe.probe_layers(model, POSITIONS))


def check_all_replaced(
    model: Any, fuse_blocks: FuseBlocks, block: type[nn.Module], num_tokens: int, most_difference: float
) -> None:
    """Both of its layers, and it says the same as before. most_difference: relative, of all logits."""
    expected = logits(model, num_tokens).float()
    assert fuse(model, fuse_blocks) == 2
    assert sum(isinstance(module, block) for module in model.modules()) == 2
    found = logits(model, num_tokens).float()
    assert float((found - expected).norm() / expected.norm()) < most_difference
