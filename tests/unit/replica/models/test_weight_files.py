"""Which safetensors files are loaded, what they take, and which are refused for what they hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from replica.models.model_loader import load_model
from replica.models.model_source import ModelRefused, resolve
from replica.models.weight_files import check_weights, weight_bytes, weight_files
from tests.fakes.model_folder import write_model


def test_weight_bytes_come_from_headers_and_the_type_loaded_as(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "m",
        a=np.zeros((10, 3), dtype=np.float32),
        b=np.zeros(5, dtype=np.float16),
        counts=np.zeros(4, dtype=np.int64),
        scalar=np.zeros((), dtype=np.float64),
    )
    resolved = resolve(str(folder))
    assert weight_bytes(resolved, "auto") == 120 + 10 + 32 + 8
    assert weight_bytes(resolved, "float32") == (30 + 5 + 1) * 4 + 32
    assert weight_bytes(resolved, "bfloat16") == (30 + 5 + 1) * 2 + 32


# -- quantized weights ----------------------------------------------------------------------------------


def write_tensor(folder: Path, name: str, stored: str, num_bytes: int = 8) -> None:
    """One tensor of bytes in a type that numpy may not know."""
    entry = {"dtype": stored, "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({name: entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("layers.0.proj.weight", "F8_E4M3"),
        ("layers.0.proj.weight", "I8"),
        ("layers.0.proj.qweight", "I32"),
        ("layers.0.proj.weight_packed", "U8"),
        ("layers.0.proj.k_scale", "F8_E8M0"),
    ],
)
def test_weights_in_types_that_need_a_scale_are_refused(folder: Path, name: str, stored: str) -> None:
    """They were served without it, as garbage, and counted at a quarter of the memory that they took."""
    write_tensor(folder, name, stored)
    resolved = resolve(str(folder))
    for look in (
        check_weights,
        lambda model: weight_bytes(model, "auto"),
        lambda model: load_model(model, torch.device("cpu"), torch.float32),
    ):
        with pytest.raises(ModelRefused, match=f"{name} in model.safetensors is {stored}: quantized"):
            look(resolved)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("h.0.attn.bias", "U8"),
        ("h.0.attn.bias", "BOOL"),
        ("embeddings.position_ids", "I64"),
        ("weights.steps", "U32"),
        ("proj.weight", "F64"),
        ("proj.weight", "BF16"),
    ],
)
def test_masks_and_positions_may_be_integers(folder: Path, name: str, stored: str) -> None:
    write_tensor(folder, name, stored)
    check_weights(resolve(str(folder)))


def write_shards(folder: Path) -> Path:
    write_model(folder)
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for index, name in enumerate(names):
        save_file({f"w{index}": np.zeros(6, dtype=np.float32)}, folder / name)
    weight_map = {"w0": names[0], "w1": names[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_counted_together(tmp_path: Path) -> None:
    resolved = resolve(str(write_shards(tmp_path / "m")))
    assert len(weight_files(resolved)) == 2
    assert weight_bytes(resolved, "auto") == 48


def test_of_a_whole_file_and_shards_those_are_checked_that_transformers_loads(tmp_path: Path) -> None:
    """It was the shards that were checked and counted, whatever was in the file that was then loaded."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model, folder = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), tmp_path / "m"
    model.save_pretrained(folder, max_shard_size="3KB")
    assert len(weight_files(resolve(str(folder)))) > 1
    zeros = {name: np.zeros(value.shape, dtype=np.float32) for name, value in model.state_dict().items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    assert weight_files(resolve(str(folder))) == [folder / "model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not any(value.any() for value in loaded.state_dict().values())


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"names files that are not there: model-00002-of-00002"):
        weight_bytes(resolve(str(folder)), "auto")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:20],
        lambda content: content[:4],
        lambda content: b"",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:9] + b"!" + content[10:],
        lambda content: b"\1" + bytes(7) + b"5",
    ],
    ids=["one-short", "one-more", "header", "length", "empty", "huge-length", "not-json", "no-object"],
)
def test_a_damaged_file_is_refused(folder: Path, damage: Any) -> None:
    check_weights(resolve(str(folder)))
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    for look in (check_weights, lambda model: weight_bytes(model, "auto")):
        with pytest.raises(ModelRefused, match=r"model\.safetensors is damaged"):
            look(resolve(str(folder)))


def test_every_file_of_several_is_looked_at(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m")
    check_weights(resolve(str(folder)))
    with (folder / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelRefused, match=r"model-00002-of-00002\.safetensors is damaged"):
        check_weights(resolve(str(folder)))


def test_weights_that_the_hub_still_has_are_not_looked_for(folder: Path) -> None:
    resolved = dataclasses.replace(resolve(str(folder)), hub_id="a/b")
    (folder / "model.safetensors").unlink()
    check_weights(resolved)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"w0": []}}])
def test_an_index_that_maps_nothing_is_refused(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"index\.json has no weight_map from parameters to files"):
        weight_files(resolve(str(folder)))
