"""What a config alone rules out, for whoever asks before a replica is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replica.models.config_rules import check_config
from replica.models.model_source import ModelRefused, ResolvedModel
from tests.model_families import FAMILIES, MORE_FAMILIES, Family

ROOT = Path(__file__).parents[4]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LLAMA = {"model_type": "llama", "max_position_embeddings": 256}


def model(folder: Path, config: dict[str, Any], max_model_len: int | None = None) -> ResolvedModel:
    (folder / "config.json").write_text(json.dumps(config))
    return ResolvedModel(str(folder), folder, "m", "0" * 40, hub_id=None, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "cannot be served: it has layers of type linear_attention; only full"),
        ({"model_type": "llama4_text"}, "it has layers of type chunked_attention"),
        ({"model_type": "gemma3n_text"}, "share another layer's keys and values"),
        ({"model_type": "t5"}, "it is an encoder-decoder model"),
        (
            {"model_type": "bloom"},
            "cannot be served: its attention does not go through transformers' Attention",
        ),
        ({"model_type": "gptj"}, "its attention does not go through transformers' AttentionInterface"),
        ({"model_type": "nobodys"}, "cannot read a 'nobodys' config"),
        ({"model_type": "own", "auto_map": {}}, "needs code from its own repository"),
        ({**LLAMA, "num_attention_heads": 5}, "cannot read a 'llama' config"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_what_no_replica_would_serve_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    """`deploy check` once said fine to all of these."""
    with pytest.raises(ModelRefused, match=reason) as refusal:
        check_config(model(tmp_path, config), max_model_len=64)
    assert refusal.value.field == "model"


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES], ids=lambda family: family.name)
def test_the_families_that_are_served_pass(tmp_path: Path, family: Family) -> None:
    check_config(model(tmp_path, family.config().to_dict()), max_model_len=None)


def test_a_family_that_is_another_ones_attention_passes(tmp_path: Path) -> None:
    """Its own code names no attention function: it builds a model of whichever family its text is."""
    check_config(model(tmp_path, {"model_type": "fuyu"}), max_model_len=None)


@pytest.mark.parametrize("original", [64, 128])
def test_length_dependent_positions_are_held_to_the_longest_sequence(tmp_path: Path, original: int) -> None:
    rope = {**DYNAMIC, "original_max_position_embeddings": original}
    long = model(tmp_path, {**LLAMA, "rope_parameters": rope})
    check_config(long, max_model_len=original)
    for max_model_len in (original + 1, None):  # the model's own 256
        with pytest.raises(ModelRefused, match=f"set max_model_len to {original} or less to serve it"):
            check_config(long, max_model_len)


def test_a_process_that_hides_torch_gets_along_without(tmp_path: Path) -> None:
    folder = model(tmp_path, {"model_type": "mamba"}).folder
    program = (
        "import sys; from pathlib import Path; from router.prompts.prompt import hide_torch; hide_torch();"
        "from replica.models.config_rules import check_config;"
        "from replica.models.model_source import ModelRefused, ResolvedModel\n"
        f"model = ResolvedModel('m', Path({str(folder)!r}), 'm', '0', hub_id=None, max_model_len=None)\n"
        "try: check_config(model, None)\n"
        "except ModelRefused as error: print('linear_attention' in str(error), 'torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "True False"
