"""What a model's config alone rules out, before weights are fetched and before a cluster is started.

Read by `deploy check`, by whoever builds the application and by the replica itself, which all give the same
reason. Knows transformers' config fields and where its families' code lies; imports no torch.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from replica.models.model_loader import load_config
from replica.models.model_source import ModelRefused, ResolvedModel

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Rotary embeddings whose frequencies depend on the longest position in the batch, beyond a length.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# A family's code that has none of these computes attention by itself: transformers' table of attention
# functions, or other families, whose code may have it.
MAY_USE_INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS|AutoModel|^from \.\.\w", re.MULTILINE)
NOT_ON_INTERFACE = "its attention does not go through transformers' AttentionInterface"


class Unsupported(Exception):
    """Why a model cannot be served; the runner puts the model's name to it."""


def check_config(resolved: ResolvedModel, max_model_len: int | None) -> None:
    """Refuses a model that no replica would serve, from its config.

    max_model_len: as it is set, tokens; None = the model's own limit. Takes a second where transformers is
    not imported yet. Raises ModelRefused.
    """
    config = load_config(resolved)
    limit = max_model_len or length_limit(config) or resolved.max_model_len
    try:
        check_layers(config)
        if limit is not None:
            check_positions(config, limit)
    except Unsupported as error:
        raise ModelRefused(resolved.source, f"cannot be served: {error}") from error


def length_limit(config: Any) -> int | None:
    """The longest sequence the model knows positions for, tokens; None if it names none."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit is not None and limit > 0 else None


def check_layers(config: Any) -> None:
    """Raises Unsupported for layers that a config already tells we cannot compute."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder-decoder model; only decoders are served")
    text = config.get_text_config()
    strange = set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if strange:
        raise Unsupported(
            f"it has layers of type {', '.join(sorted(strange))}; only full and sliding attention are served"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise Unsupported("some of its layers share another layer's keys and values")
    if getattr(text, "attn_temperature_tuning", False) and 0 in (getattr(text, "no_rope_layers", None) or ()):
        # Also where every sequence is shorter: several in a step are not.
        raise Unsupported(
            "its layers without rotary positions scale attention by a token's place in the step "
            "(attn_temperature_tuning); set that to false in its config.json, which changes nothing in fewer "
            f"than {text.floor_scale} tokens, and max_model_len below that"
        )
    if not _may_use_interface(config):
        raise Unsupported(NOT_ON_INTERFACE)


def check_positions(config: Any, max_model_len: int) -> None:
    """Raises Unsupported if positions up to `max_model_len` tokens depend on what else is in the batch."""
    text = config.get_text_config()
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        if max_model_len > original:
            raise Unsupported(
                f"its {kind} rotary embedding changes with the longest sequence in a batch beyond {original} "
                f"tokens; set max_model_len to {original} or less to serve it"
            )


def _may_use_interface(config: Any) -> bool:
    """Whether the family's code may attend by transformers' AttentionInterface; true where none is found."""
    files = Path(inspect.getfile(type(config))).parent.glob("modeling_*.py")
    code = [file.read_text(encoding="utf-8") for file in files]
    return not code or any(MAY_USE_INTERFACE.search(each) for each in code)


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """The model's rotary settings: one set, or one per layer type."""
    value = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    nested = [each for each in value.values() if isinstance(each, dict)]
    return nested or [value]
