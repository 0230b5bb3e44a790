"""A folder to begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.model_folder import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "my-model")
