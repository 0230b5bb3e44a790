"""Can this model be served exactly? Found out from one tiny forward, before any request.

The engine packs many sequences into one forward and swaps attention only: whatever else looks across
tokens (recurrent layers, masks of the model's own, positions that depend on the batch) would mix
requests or change their answers. Each refusal says which of these it found. Knows transformers'
config fields; knows no pages. What its config alone rules out: `config_rules.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from replica.attention import interface
from replica.attention.kv_pages import LayerShape
from replica.models.config_rules import NOT_ON_INTERFACE
from replica.models.config_rules import Unsupported as Unsupported  # who probes hears of both kinds alike


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
        raise Unsupported(NOT_ON_INTERFACE)
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
