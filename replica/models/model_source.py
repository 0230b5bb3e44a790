"""From the `model` setting to a folder with a config, a tokenizer and safetensors weights.

Accepts "tiny", a local folder or a hub id. What cannot be served is refused here, before anything
is loaded, in words that name the way out. Importing this file imports neither torch nor
transformers; `resolve` needs neither. Knows nothing of pages or attention.

    ConfigError
    └── ModelRefused          this model cannot be served; nothing is left running
        └── NotEnoughMemory   it could, with more memory; both numbers
"""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache import heap
from cache.errors import ConfigError
from cache.fingerprint import folder_revision
from replica.memory import human_bytes
from replica.models import tiny_model

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
QUANTIZATION_CONFIG = "hf_quant_config.json"  # ModelOpt's; others write into config.json
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
METADATA_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STORED_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
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


def weight_files(resolved: ResolvedModel) -> list[Path]:
    """The safetensors files the loader reads. Raises ModelRefused when the index names a missing one."""
    whole = resolved.folder / WEIGHTS
    if whole.exists() or not (names := _shards(resolved)):  # of both, transformers reads the whole file
        return [whole]
    missing = [name for name in names if not (resolved.folder / name).exists()]
    if missing:
        raise ModelRefused(
            resolved.source, f"{WEIGHTS_INDEX} names files that are not there: {', '.join(missing)}"
        )
    return [resolved.folder / name for name in names]


def _shards(resolved: ResolvedModel) -> list[str]:
    """The files that the index names, sorted; none without an index. Raises ModelRefused for one that maps
    nothing."""
    index = resolved.folder / WEIGHTS_INDEX
    if not index.exists():
        return []
    weight_map = read_json(resolved.source, index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelRefused(resolved.source, f"{WEIGHTS_INDEX} has no weight_map from parameters to files")
    return sorted(set(names))


def check_weights(resolved: ResolvedModel) -> None:
    """That all weights are here, whole and not quantized, as far as the files' headers and sizes tell.

    Nothing is loaded. Of a hub model nothing is looked at, which is fetched later. Raises ModelRefused.
    """
    if resolved.hub_id is None:
        for _ in _stored_tensors(resolved):
            pass


def weight_bytes(resolved: ResolvedModel, dtype: str) -> int:
    """Bytes the weights take once loaded as `dtype` ("auto" = as stored), from the files' headers alone."""
    total = 0
    for tensor in _stored_tensors(resolved):
        stored = STORED_BYTES[tensor["dtype"]]
        is_float = tensor["dtype"] in FLOAT_TYPES
        total += prod(tensor["shape"]) * (ELEMENT_BYTES.get(dtype, stored) if is_float else stored)
    return total


def _stored_tensors(resolved: ResolvedModel) -> Iterator[dict[str, Any]]:
    """What the files' headers say of each tensor. Raises ModelRefused for one that is not as it was trained.

    Families save masks and positions as integers; a weight that is one has lost its scale.
    """
    for path in weight_files(resolved):
        for name, tensor in _safetensors_header(resolved.source, path).items():
            stored, is_weight = tensor["dtype"], "weight" in name.rpartition(".")[2]
            if stored not in STORED_BYTES or (is_weight and stored not in FLOAT_TYPES):
                raise ModelRefused(resolved.source, f"{name} in {path.name} is {stored}: {UNQUANTIZED}")
            yield tensor


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
    folder = _fetch_weights(resolved)
    for _ in _stored_tensors(resolved):  # a hub model's were not here when the rest was checked
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
            model, f"neither a local folder nor a model the hub gives us: {_first_line(error)}"
        ) from error
    config = _check_metadata(model, folder, names)
    return ResolvedModel(model, folder, model, commit, hub_id=model, max_model_len=_length_limit(config))


def _fetch_weights(resolved: ResolvedModel) -> Path:
    """The folder with the weights in it, fetched now (with progress) if they were not."""
    if resolved.hub_id is None:
        return resolved.folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*METADATA_PATTERNS, WEIGHTS, *map(glob.escape, _shards(resolved))]
    try:
        return Path(snapshot_download(resolved.hub_id, revision=resolved.revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError) as error:
        raise ModelRefused(resolved.source, f"its weights cannot be fetched: {_first_line(error)}") from error


def fetch_weights(resolved: ResolvedModel) -> None:
    """Bring a hub model's weights onto this machine, with progress; nothing to do for a folder."""
    _fetch_weights(resolved)


# -- files ------------------------------------------------------------------------------------------


def read_json(model: str, path: Path) -> dict[str, Any]:
    """The object in one of a model's files. Raises ModelRefused, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(model, f"{path.name} cannot be read: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelRefused(model, f"{path.name} is not a JSON object")
    return value


def _safetensors_header(model: str, path: Path) -> dict[str, Any]:
    """Tensor name -> {"dtype", "shape", ...}. Raises ModelRefused for a damaged or truncated file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100_000_000:  # the format's own limit
                raise ValueError("header too long")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes long, its header promises {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused(model, f"{path.name} is damaged: {_first_line(error)}") from error
    return header


def described(error: Exception) -> str:
    """What kind of error it is, and its first line; the second, too, where the first only leads to it."""
    first, *others = str(error).strip().split("\n")
    told = " ".join([first, others[0].strip()]) if first.endswith(":") and others else first
    kind = type(error).__name__
    return f"{kind}: {told}" if told else kind


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
