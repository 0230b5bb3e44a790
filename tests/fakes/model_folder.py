"""A model's folder with next to nothing in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {"model_type": "qwen3", "max_position_embeddings": 512, "dtype": "bfloat16"}


def write_model(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors or {"weight": np.zeros((2, 3), dtype=np.float32)}, folder / "model.safetensors")
    return folder
