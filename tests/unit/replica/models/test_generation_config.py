"""What a model's generation_config.json says of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replica.models.generation_config import sampling_defaults
from replica.models.model_source import ModelRefused, ResolvedModel, resolve


def of(folder: Path, content: dict[str, Any] | None) -> dict[str, Any]:
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps(content))
    return sampling_defaults(ResolvedModel("m", folder, "m", "r", None, None))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"temperature": 1, "min_p": 0.1, "eos_token_id": 2}, {"temperature": 1, "min_p": 0.1}),
        ({"temperature": None, "top_k": 0}, {"top_k": 0}),
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {}),
        ({"max_new_tokens": 5, "num_beams": 4}, {"max_tokens": 5}),
        ({"do_sample": False, "max_new_tokens": 5, "top_k": 3}, {"max_tokens": 5}),
        ({"max_length": 20, "max_new_tokens": None}, {}),
        (None, {}),
    ],
)
def test_what_it_sets_is_taken_unless_it_says_not_to_sample(
    tmp_path: Path, content: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    assert of(tmp_path, content) == expected


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"generation_config\.json cannot be read"):
        of(tmp_path, None)


def test_the_tiny_model_is_sampled_as_the_api_says() -> None:
    """Tests and measurements rely on it."""
    assert sampling_defaults(resolve("tiny")) == {}
