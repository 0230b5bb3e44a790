"""A checkpoint on disk, as small as one can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from replica.models.model_source import ResolvedModel, resolve


@pytest.fixture
def stored(tmp_path: Path) -> ResolvedModel:
    """A million weights in float32."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    save_file({"weight": np.zeros((1024, 1024), dtype=np.float32)}, tmp_path / "model.safetensors")
    return resolve(str(tmp_path))
