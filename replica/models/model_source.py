"""From the `model` setting to a folder with a config, and what of its files says that it is not served.

Accepts "tiny", a local folder or a hub id. What cannot be served is refused here, before anything
is loaded, in words that name the way out. Importing this file imports neither torch nor
transformers; `resolve` needs neither. Knows nothing of pages or attention.

    ConfigError
    └── ModelRefused          this model cannot be served; nothing is left running
        └── NotEnoughMemory   it could, with more memory; both numbers
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import ConfigError
from cache.fingerprint import folder_revision
from replica.memory import human_bytes
from replica.models import tiny_model

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
QUANTIZATION_CONFIG = "hf_quant_config.json"  # ModelOpt's; others write into config.json
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
METADATA_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNQUANTIZED = (
    "quantized weights are not served; use those that they were made from, or convert them to bfloat16"
)


class ModelRefused(ConfigError):
    """The model named by `model` cannot be served, and why."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__("model", model, reason)


class NotEnoughMemory(ModelRefused):
    """Weights and the smallest KV pages do not fit into what is free."""

    def __init__(self, model: str, needed_bytes: int, free_bytes: int, device: str, purpose: str) -> None:
        super().__init__(
            model,
            f"needs {human_bytes(needed_bytes)} of memory on {device} for {purpose}, "
            f"{human_bytes(free_bytes)} are free",
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model whose files other than weights are on this machine."""

    source: str  # the setting as given
    folder: Path  # config and tokenizer; weights too unless `hub_id` is set and they were never fetched
    model_id: str  # "tiny", the folder's name, or the hub id: the same on every replica
    revision: str  # hub commit, or `folder_revision`
    hub_id: str | None  # None for a local folder
    max_model_len: int | None  # what config.json says, tokens; None when it leaves it to the family's default


def resolve(model: str, revision: str | None = None) -> ResolvedModel:
    """Find the model and check that it is one we load: config, safetensors, no pickles.

    For a hub id this fetches the small files, with progress; for "tiny" it draws the weights at first
    start. Raises ModelRefused. Does not import torch or transformers.
    """
    if model == tiny_model.MODEL_ID:
        return _resolve_folder(model, _tiny_folder(), revision=None, model_id=tiny_model.MODEL_ID)
    try:
        folder = Path(model).expanduser()
        is_here, is_folder = folder.exists(), folder.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or nobody of the name behind "~"
        reason = getattr(error, "strerror", None) or error
        raise ModelRefused(model, f"cannot be looked for on this machine: {reason}") from error
    if is_here:
        if not is_folder:
            raise ModelRefused(model, "is a file; name the folder with config.json and *.safetensors")
        return _resolve_folder(model, folder.resolve(), revision, folder.resolve().name)
    if _looks_like_a_path(model):
        raise ModelRefused(model, "this folder does not exist")
    return _resolve_hub(model, revision)


def _tiny_folder() -> Path:
    try:
        return tiny_model.ensure_built()
    except OSError as error:
        reason = f"its weights cannot be written below {tiny_model.cache_root()} ({error.strerror or error})"
        raise ModelRefused(
            tiny_model.MODEL_ID, f"{reason}: set WARMPATH_CACHE to a folder that can be written to"
        ) from error


def stored_dtype(resolved: ResolvedModel) -> str:
    """The float type the checkpoint was saved as; "bfloat16" where its config does not say."""
    config = read_json(resolved.source, resolved.folder / "config.json")
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in ELEMENT_BYTES else "bfloat16"


# -- folders ----------------------------------------------------------------------------------------


def _resolve_folder(model: str, folder: Path, revision: str | None, model_id: str) -> ResolvedModel:
    config = _check_metadata(model, folder, [path.name for path in folder.iterdir()])
    found = folder_revision(folder)
    if revision not in (None, found):
        needed = "leave it out, or deploy anew where the folder has changed since"
        raise ModelRefused(model, f"`revision` is {revision}, but this folder's own is {found}; {needed}")
    return ResolvedModel(model, folder, model_id, found, hub_id=None, max_model_len=_length_limit(config))


def _check_metadata(model: str, folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The config of a model whose small files are in `folder`, and of all files these names. Raises
    ModelRefused."""
    listed = set(names)
    _check_listing(model, listed)
    config = read_json(model, folder / "config.json")
    if named := config.get("transformers_weights"):
        raise ModelRefused(
            model,
            f"config.json names weights of its own ({named}): only {WEIGHTS} and {WEIGHTS_INDEX} are read",
        )
    _check_unquantized(model, config, listed)
    _check_generation_config(model, folder)
    return config


def _check_unquantized(model: str, config: dict[str, Any], listed: set[str]) -> None:
    """transformers passes over a method that it does not know, and serves numbers without their scales."""
    if QUANTIZATION_CONFIG in listed:
        raise ModelRefused(model, f"there is a {QUANTIZATION_CONFIG}: {UNQUANTIZED}")
    for level in _levels(config):
        found = level.get("quantization_config")
        if found is not None:
            method = found.get("quant_method", "unnamed") if isinstance(found, dict) else "unnamed"
            raise ModelRefused(
                model, f"config.json has a quantization_config (quant_method: {method}): {UNQUANTIZED}"
            )


def _check_listing(model: str, listed: set[str]) -> None:
    """Raises ModelRefused unless the files listed include a config and safetensors weights."""
    if "config.json" not in listed:
        raise ModelRefused(model, "there is no config.json: not a transformers model folder")
    if WEIGHTS in listed or WEIGHTS_INDEX in listed:
        return
    pickles = sorted(name for name in listed if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        raise ModelRefused(
            model,
            f"its weights are pickles ({', '.join(pickles[:3])}), which can run code when opened: "
            "safetensors only; convert them with model.save_pretrained()",
        )
    raise ModelRefused(model, f"there are no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def _check_generation_config(model: str, folder: Path) -> None:
    """Many models name what ends a text there alone, and transformers passes over a file it cannot read."""
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return
    ends = read_json(model, path).get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ModelRefused(
            model, f"the eos_token_id of {GENERATION_CONFIG} is neither a token id nor a list of them"
        )


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~", "\\")) or model in (".", "..") or model.count("/") > 1


def _levels(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config and, in one of several kinds of input, its part for text."""
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, dict) else [config]


def _length_limit(config: dict[str, Any]) -> int | None:
    for level in _levels(config):
        for key in LENGTH_KEYS:
            if isinstance(level.get(key), int):
                return int(level[key])
    return None


# -- hub --------------------------------------------------------------------------------------------


def _resolve_hub(model: str, revision: str | None) -> ResolvedModel:
    """Fetch the small files of a hub model; its snapshot folder is named by the commit."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=METADATA_PATTERNS))
        commit = folder.name
        try:
            names = HfApi().list_repo_files(model, revision=commit)
        except (OfflineModeIsEnabled, HfHubHTTPError, OSError):  # offline: what was fetched before must do
            names = [path.name for path in folder.iterdir()]
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelRefused(
            model, f"neither a local folder nor a model the hub gives us: {first_line(error)}"
        ) from error
    config = _check_metadata(model, folder, names)
    return ResolvedModel(model, folder, model, commit, hub_id=model, max_model_len=_length_limit(config))


# -- files ------------------------------------------------------------------------------------------


def read_json(model: str, path: Path) -> dict[str, Any]:
    """The object in one of a model's files. Raises ModelRefused, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(model, f"{path.name} cannot be read: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelRefused(model, f"{path.name} is not a JSON object")
    return value


def described(error: Exception) -> str:
    """What kind of error it is, and its first line; the second, too, where the first only leads to it."""
    first, *others = str(error).strip().split("\n")
    told = " ".join([first, others[0].strip()]) if first.endswith(":") and others else first
    kind = type(error).__name__
    return f"{kind}: {told}" if told else kind


def first_line(error: Exception) -> str:
    """The error's, or its type where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
