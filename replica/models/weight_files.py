"""A model's safetensors files: which are loaded, whether they are whole, and what they take.

Looks at headers and sizes; loads nothing, and needs neither torch nor transformers.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from replica.models.model_source import (
    ELEMENT_BYTES,
    METADATA_PATTERNS,
    UNQUANTIZED,
    WEIGHTS,
    WEIGHTS_INDEX,
    ModelRefused,
    ResolvedModel,
    first_line,
    read_json,
)

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


def check_weights(resolved: ResolvedModel) -> None:
    """That all weights are here, whole and not quantized, as far as the files' headers and sizes tell.

    Nothing is loaded. Of a hub model nothing is looked at, which is fetched later. Raises ModelRefused.
    """
    if resolved.hub_id is None:
        for _ in stored_tensors(resolved):
            pass


def weight_bytes(resolved: ResolvedModel, dtype: str) -> int:
    """Bytes the weights take once loaded as `dtype` ("auto" = as stored), from the files' headers alone."""
    total = 0
    for tensor in stored_tensors(resolved):
        stored = STORED_BYTES[tensor["dtype"]]
        is_float = tensor["dtype"] in FLOAT_TYPES
        total += prod(tensor["shape"]) * (ELEMENT_BYTES.get(dtype, stored) if is_float else stored)
    return total


def stored_tensors(resolved: ResolvedModel) -> Iterator[dict[str, Any]]:
    """What the files' headers say of each tensor. Raises ModelRefused for one that is not as it was trained.

    Families save masks and positions as integers; a weight that is one has lost its scale.
    """
    for path in weight_files(resolved):
        for name, tensor in _safetensors_header(resolved.source, path).items():
            stored, is_weight = tensor["dtype"], "weight" in name.rpartition(".")[2]
            if stored not in STORED_BYTES or (is_weight and stored not in FLOAT_TYPES):
                raise ModelRefused(resolved.source, f"{name} in {path.name} is {stored}: {UNQUANTIZED}")
            yield tensor


def fetch_weights(resolved: ResolvedModel) -> Path:
    """The folder with the weights in it: a hub model's are fetched now, with progress, if they were not."""
    if resolved.hub_id is None:
        return resolved.folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*METADATA_PATTERNS, WEIGHTS, *map(glob.escape, _shards(resolved))]
    try:
        return Path(snapshot_download(resolved.hub_id, revision=resolved.revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError) as error:
        raise ModelRefused(resolved.source, f"its weights cannot be fetched: {first_line(error)}") from error


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
        raise ModelRefused(model, f"{path.name} is damaged: {first_line(error)}") from error
    return header
