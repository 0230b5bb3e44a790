"""Can this model be served exactly? Found out from its config and one tiny forward, before any request.

The engine packs many sequences into one forward and swaps attention only: whatever else looks across
tokens (recurrent layers, masks of the model's own, positions that depend on the batch) would mix
requests or change their answers. Each refusal says which of these it found. Knows transformers'
config fields; knows no pages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from replica.attention import interface
from replica.attention.kv_pages import LayerShape

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Rotary embeddings whose frequencies depend on the longest position in the batch, beyond a length.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class Unsupported(Exception):
    """Why a model cannot be served; the runner puts the model's name to it."""


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


def check_windows(config: Any, layers: Sequence[tuple[nn.Module, LayerShape]], max_model_len: int) -> None:
    """Raises Unsupported where the model keeps a sliding window to its own mask, which nobody builds here.

    Attention then sees further back than the model's, in sequences longer than the window alone: longer than
    any that it is tried with when it is loaded.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or window >= max_model_len or not hasattr(type(text), "sliding_window"):
        return
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(layers)
    untold = [
        shape
        for kind, (_, shape) in zip(kinds, layers, strict=False)
        if kind == "sliding_attention" and shape.window is None
    ]
    if untold:
        raise Unsupported(
            f"{len(untold)} of its layers do not tell attention of their window of {window} tokens; set "
            f"max_model_len to {window} or less to serve it"
        )


def probe_layers(model: Any, positions: Sequence[int] = (0, 1)) -> list[tuple[nn.Module, LayerShape]]:
    """Attention modules in model order, each with the K/V shape it was seen to produce.

    Switches the model to our attention function and runs it once, a token per position. Raises Unsupported.
    """
    try:
        layers, _ = _probing_run(model, positions)
    except interface.UnsupportedAttention as error:
        raise Unsupported(str(error)) from error
    except Exception as error:  # whatever a family raises here, it is no family we can serve
        raise Unsupported(
            f"its forward fails under our attention: {type(error).__name__}: {error}"
        ) from error
    expected = model.config.get_text_config().num_hidden_layers
    if not layers:
        raise Unsupported("its attention does not go through transformers' AttentionInterface")
    if len(layers) != expected:
        raise Unsupported(f"only {len(layers)} of its {expected} layers attend through AttentionInterface")
    return layers


def without_weights(config: Any, dtype: torch.dtype) -> Any:
    """A model of this config that has no memory for weights. Raises Unsupported."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    except Exception as error:
        raise Unsupported(f"it cannot be built without weights: {type(error).__name__}: {error}") from error


def shapes_without_weights(config: Any, dtype: torch.dtype) -> list[LayerShape]:
    """The layers' shapes, from a model of this config that has no memory for weights.

    Raises Unsupported for a family that looks at its numbers on the way, and for one that is not served.
    """
    return [shape for _, shape in probe_layers(without_weights(config, dtype))]


def run_without_pages(model: Any, num_tokens: int, num_rows: int, max_model_len: int) -> None:
    """A forward of a full step, of sequences as long as they may be; its attention answers zeros.

    num_rows: of logits, if the model can choose.
    """
    options = {"logits_to_keep": num_rows} if model._supports_logits_to_keep() else {}
    _probing_run(model, [place % max_model_len for place in range(num_tokens)], **options)


def replay_logits(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """What the model returns when its output layer says `logits`. Raises whatever the model then raises."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(_ReplayedHead(logits))
    try:
        return _probing_run(model, (0, 1), logits_to_keep=torch.zeros(1, dtype=torch.int64))[1]
    finally:
        model.set_output_embeddings(head)


class _ReplayedHead(nn.Module):
    """Stands in for an output layer and always says the same."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._logits = logits

    def forward(self, _rows: torch.Tensor) -> torch.Tensor:
        return self._logits.clone()  # a family may change them in place


def _probing_run(
    model: Any, positions: Sequence[int], **options: Any
) -> tuple[list[tuple[nn.Module, LayerShape]], torch.Tensor]:
    """A few tokens under our attention without pages: the attention modules reached, and the logits."""
    tokens = torch.zeros(1, len(positions), dtype=torch.int64)
    interface.register()
    for module in model.modules():
        interface.forget(module)
    try:
        model.set_attn_implementation(interface.ATTENTION_NAME)
        with torch.inference_mode():
            logits = run(model, tokens, torch.tensor([positions]), **options)
    finally:
        layers = interface.probed_layers(model)
    return layers, logits


def run(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of one forward without transformers' own cache, (1, tokens, vocabulary)."""
    device = model.device
    logits: torch.Tensor = model(
        input_ids=input_ids.to(device), position_ids=positions.to(device), use_cache=False, **options
    ).logits
    return logits


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """The model's rotary settings: one set, or one per layer type."""
    value = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    nested = [each for each in value.values() if isinstance(each, dict)]
    return nested or [value]
