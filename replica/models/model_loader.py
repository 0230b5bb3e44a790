"""A model's config and the model itself, through transformers' own loaders."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cache import heap
from replica.models.model_source import ModelRefused, ResolvedModel, described, read_json
from replica.models.weight_files import fetch_weights, stored_tensors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def load_config(resolved: ResolvedModel) -> Any:
    """The model's transformers config. Raises ModelRefused for unknown families and remote code."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(resolved.folder, trust_remote_code=False)
    except Exception as error:  # families check their fields, each with errors of its own
        raw = read_json(resolved.source, resolved.folder / "config.json")
        family = raw.get("model_type", "unnamed")
        if "auto_map" in raw:
            raise ModelRefused(
                resolved.source,
                f"model type {family!r} needs code from its own repository, and remote code is never run",
            ) from error
        raise ModelRefused(
            resolved.source,
            f"this version of transformers cannot read a {family!r} config: {described(error)}",
        ) from error


def load_model(resolved: ResolvedModel, device: torch.device, dtype: torch.dtype) -> Any:
    """The model in eval mode on `device`, through `AutoModelForCausalLM`; shows transformers' progress bar.

    safetensors only, no remote code. Raises ModelRefused; a checkpoint that lacks parameters is refused,
    because they would be left at random, and one with more for a layer than it reads, because it would
    compute something else.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config = load_config(resolved)
    folder = fetch_weights(resolved)
    for _ in stored_tensors(resolved):  # a hub model's were not here when the rest was checked
        pass
    try:
        with heap.without_collections():
            MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # imports the family, without weights
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name; transformers only points at its log
        )
    except Exception as error:  # families check what they are built with, each with errors of its own
        raise ModelRefused(resolved.source, f"cannot be loaded: {described(error)}") from error
    misfits = sorted(
        f"{name}: {list(found)}, not {list(wanted)}" for name, found, wanted in report["mismatched_keys"]
    )
    if misfits:
        raise ModelRefused(
            resolved.source,
            f"{len(misfits)} parameters have other shapes than its config.json says ({misfits[0]}, ...)",
        )
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ModelRefused(
            resolved.source,
            f"its weights lack {len(lacking)} parameters of {type(model).__name__} "
            f"({', '.join(lacking[:3])}, ...): not a causal language model's checkpoint",
        )
    _check_unread(resolved.source, model, report["unexpected_keys"])
    return model.to(device).eval()


def _check_unread(source: str, model: Any, unread: Iterable[str]) -> None:
    """Raises ModelRefused for tensors that belong to a layer which is computed without them.

    Scales, biases and adapters do. What stands by itself changes no answer: layers that predict further
    tokens, towers for images, heads that judge, masks; that is told in the log. Of what transformers knows
    that a family leaves over it says nothing.
    """
    layers = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    names = sorted(unread)
    changing = [name for name in names if not layers.isdisjoint(_owners(name))]
    if changing:
        raise ModelRefused(
            source,
            f"its weights have {len(changing)} tensors that {type(model).__name__} does not read "
            f"({', '.join(changing[:3])}, ...): it would answer as another model",
        )
    if names:
        logger.warning("weights that are not used", extra={"count": len(names), "first": names[:3]})


def _owners(name: str) -> list[str]:
    """The modules that a tensor lies in, by their names: "a.b" and "a" of "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
