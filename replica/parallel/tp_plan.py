"""Which of a model's layers are cut, and how: transformers' own plan for it, read and checked.

A plan maps names with wildcards to styles ("layers.*.self_attn.q_proj": "colwise"). The family's authors
wrote it; the base model's hangs on the config, the output layer's on the model class. Both are plain
mappings in every version, while what transformers itself does with them has changed from one to the next: so
they are read here, and carried out in `sharding.py`. Knows names, styles and head counts; cuts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cache.errors import ConfigError
from replica.models.model_probe import Unsupported

Plan = Mapping[str, str]
"""Style by name pattern, as in `model.named_modules()` and `named_parameters()`; `*` is a layer's number."""

COLWISE = "colwise"  # each rank has some of the outputs, and what follows goes on with those
ROWWISE = "rowwise"  # each rank has some of the inputs; the outputs are sums over the ranks
COLWISE_GATHERED = "colwise_gather_output"  # some of the outputs, then everybody has all of them
ROWWISE_SPLIT = "rowwise_split_input"  # everybody has all inputs and takes its own; then as ROWWISE
PACKED_COLWISE = "packed_colwise"  # two matrices one below the other, each cut as COLWISE
SUMMED = "moe_tp_experts"  # a module whose outputs are sums over the ranks
WHOLE = ("replicate", "replicated_with_grad_allreduce")  # everybody has all of it
SERVED = (COLWISE, ROWWISE, COLWISE_GATHERED, ROWWISE_SPLIT, PACKED_COLWISE, SUMMED, *WHOLE)

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def plan_of(model: Any) -> dict[str, str]:
    """The plan of a transformers causal language model. Raises Unsupported: it has none, or a style that is
    not served."""
    base = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not base:
        raise Unsupported(
            "its family has no plan in transformers for several devices: tensor_parallel must be 1"
        )
    prefix = model.base_model_prefix
    plan = {f"{prefix}.{name}": style for name, style in base.items()}
    plan |= getattr(type(model), "_tp_plan", None) or {}
    strange = sorted(set(plan.values()) - set(SERVED))
    if strange:
        raise Unsupported(f"transformers' plan for it cuts layers in ways not served: {', '.join(strange)}")
    return plan


def style_of(plan: Plan, name: str) -> str | None:
    """How the module or parameter of this name is cut; None = it is not."""
    return plan.get(_LAYER_NUMBER.sub("*", name))


def check_heads(config: Any, plan: Plan, num_ranks: int) -> None:
    """Raises ConfigError with both numbers where heads that the plan cuts do not divide among the ranks."""
    if not any("attn" in name or "attention" in name for name, style in plan.items() if style == COLWISE):
        return  # every rank attends with all of them
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    for number, what in ((num_heads, "attention heads"), (num_kv_heads, "key/value heads")):
        if number % num_ranks:
            accepted = f"must divide the model's {number} {what}"
            raise ConfigError("tensor_parallel", num_ranks, accepted)
