"""From a setting to a folder with a config and safetensors weights, or a refusal that names the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replica.models import model_source
from replica.models.model_source import ModelRefused, resolve, stored_dtype
from replica.models.weight_files import fetch_weights, weight_bytes
from tests.fakes.model_folder import write_model

ROOT = Path(__file__).parents[4]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


# -- local folders --------------------------------------------------------------------------------------


def test_a_folder_is_named_by_its_last_part_and_its_own_digest(folder: Path) -> None:
    resolved = resolve(str(folder))
    assert (resolved.folder, resolved.model_id, resolved.hub_id) == (folder, "my-model", None)
    assert resolved.max_model_len == 512
    assert len(resolved.revision) == 40
    assert resolve(str(folder), resolved.revision) == resolved


def test_a_place_for_the_tiny_models_weights_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose file system is read-only, or whose user has no home."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ModelRefused, match=r"'tiny': its weights cannot be written below .*file/cache \(Not a"
    ):
        resolve("tiny")


def test_an_equal_copy_elsewhere_has_the_same_revision(folder: Path, tmp_path: Path) -> None:
    """Replicas on other nodes must agree on every block hash."""
    assert (
        resolve(str(write_model(tmp_path / "other" / "my-model"))).revision == resolve(str(folder)).revision
    )


def test_another_revision_of_a_folder_cannot_be_asked_for(folder: Path) -> None:
    with pytest.raises(ModelRefused, match=r"`revision` is main, but this folder's own is [0-9a-f]{40}"):
        resolve(str(folder), "main")


def test_tiny_is_drawn_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path))
    resolved = resolve("tiny")
    assert resolved.folder.parent == tmp_path
    assert (resolved.model_id, resolved.max_model_len) == ("tiny", 32768)


@pytest.mark.parametrize("model", ["a" * 256, "/" + "a" * 256, "./" + "a" * 5000, "~nobody-of-this-name/m"])
def test_what_the_system_does_not_look_for_is_refused(model: str) -> None:
    with pytest.raises(ModelRefused, match="cannot be looked for on this machine: "):
        resolve(model)


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "../nowhere", "~/no-such-folder", "a/b/c"])
def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(ModelRefused, match="this folder does not exist"):
        resolve(model)


def test_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(ModelRefused, match="is a file; name the folder"):
        resolve(str(folder / "config.json"))


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelRefused, match=r"no config\.json"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", r"config\.json cannot be read"), ("[]", r"config\.json is not a JSON object")],
)
def test_a_config_that_is_none_is_refused(folder: Path, content: str, reason: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelRefused, match=reason):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"eos_token_id": 2', "generation_config.json cannot be read"),
        ("[2]", "generation_config.json is not a JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id of generation_config.json is neither"),
        ('{"eos_token_id": [2, 3.0]}', "eos_token_id of generation_config.json is neither"),
    ],
)
def test_a_generation_config_that_is_none_is_refused(folder: Path, content: str, reason: str) -> None:
    """transformers passes over it, and a model whose end is named there alone would never stop."""
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelRefused, match=reason):
        resolve(str(folder))


@pytest.mark.parametrize(
    "content", ["{}", '{"eos_token_id": null}', '{"eos_token_id": 2}', '{"eos_token_id": [2, 3]}']
)
def test_a_generation_config_may_name_ends_or_none(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    assert resolve(str(folder)).folder == folder


def test_weights_in_a_file_that_the_config_names_are_refused(tmp_path: Path) -> None:
    """transformers would load them, and nobody has checked them."""
    folder = write_model(tmp_path / "m", {"transformers_weights": "other.safetensors"})
    with pytest.raises(ModelRefused, match=r"names weights of its own \(other\.safetensors\): only model\."):
        resolve(str(folder))


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"no weights: neither model\.safetensors nor"):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name_and_without_being_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not even a pickle")
    with pytest.raises(ModelRefused, match="safetensors only"):
        resolve(str(folder))


def test_pickles_beside_safetensors_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert resolve(str(folder)).folder == folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_positions": 77}, 77),
        ({"text_config": {"max_position_embeddings": 9}}, 9),
        ({"max_position_embeddings": 5, "text_config": {"max_position_embeddings": 9}}, 5),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
)
def test_the_length_limit_is_found_where_families_keep_it(
    tmp_path: Path, config: dict[str, Any], expected: int | None
) -> None:
    assert resolve(str(write_model(tmp_path / "m", config))).max_model_len == expected


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "modelopt"}},
        {"text_config": {"quantization_config": {"quant_method": "modelopt"}}},
        {"quantization_config": {"quant_algo": "FP8"}},
        {"quantization_config": {}},
        {"quantization_config": "fp8"},
    ],
)
def test_a_config_of_quantized_weights_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """Of a method that it does not know transformers warns, and reads the numbers without their scales."""
    folder = write_model(tmp_path / "m", config)
    with pytest.raises(
        ModelRefused, match=r"quantization_config \(quant_method: (modelopt|unnamed)\): quant"
    ):
        resolve(str(folder))


def test_a_config_may_say_that_nothing_is_quantized(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {"quantization_config": None})
    assert resolve(str(folder)).folder == folder


def test_quantized_weights_whose_config_is_a_file_beside_are_refused(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"there is a hf_quant_config\.json: quantized weights are not"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float8_e4m3fn"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_stored_type(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    assert stored_dtype(resolve(str(write_model(tmp_path / "m", config)))) == expected


def test_resolving_imports_neither_torch_nor_transformers(folder: Path) -> None:
    program = (
        "import sys\nfrom replica.models.model_source import resolve\n"
        "from replica.models.weight_files import weight_bytes\n"
        f"weight_bytes(resolve({str(folder)!r}), 'auto')\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


# -- the hub --------------------------------------------------------------------------------------------


class FakeHub:
    """Answers as huggingface_hub does, from a folder; notes what was asked of it."""

    def __init__(self, tmp_path: Path, files: list[str]) -> None:
        self.snapshot = write_model(tmp_path / "snapshots" / COMMIT)
        (self.snapshot / "model.safetensors").rename(tmp_path / "weights")  # not fetched yet
        self._weights = tmp_path / "weights"
        self.files = files
        self.asked: list[tuple[str | None, list[str]]] = []
        self.is_offline = False

    def snapshot_download(self, repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((revision, allow_patterns))
        if "model.safetensors" in allow_patterns:
            (self.snapshot / "model.safetensors").write_bytes(self._weights.read_bytes())
        return str(self.snapshot)

    def list_repo_files(self, repo: str, *, revision: str | None) -> list[str]:
        if self.is_offline:
            raise ConnectionError("no route to the hub")
        assert revision == COMMIT
        return self.files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    import huggingface_hub

    fake = FakeHub(tmp_path, ["config.json", "model.safetensors", "tokenizer.json"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "list_repo_files",
        lambda api, *args, **kwargs: fake.list_repo_files(*args, **kwargs),
    )
    return fake


def test_a_hub_model_is_named_by_its_id_and_commit_and_its_weights_wait(hub: FakeHub) -> None:
    resolved = resolve("org/model", "main")
    assert (resolved.model_id, resolved.hub_id, resolved.revision) == ("org/model", "org/model", COMMIT)
    assert hub.asked == [("main", model_source.METADATA_PATTERNS)]
    assert not (resolved.folder / "model.safetensors").exists()
    fetch_weights(resolved)
    assert hub.asked[1][0] == COMMIT  # never a branch that has moved on meanwhile
    assert weight_bytes(resolved, "auto") == 24


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"],
        ["part[1].safetensors", "parts/2.safetensors"],
    ],
)
def test_the_shards_that_a_hub_models_index_names_are_fetched_and_no_others(
    hub: FakeHub, names: list[str]
) -> None:
    """Only those called model-* were, and a model with others could not be loaded."""
    from huggingface_hub.utils import filter_repo_objects

    weight_map = {f"w{place}": name for place, name in enumerate(names)}
    (hub.snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fetch_weights(resolve("org/model"))
    others = ["model-00001-of-00002.safetensors", "part1.safetensors", "pytorch_model.bin"]
    assert list(filter_repo_objects([*names, *others], allow_patterns=hub.asked[1][1])) == names


def test_a_quantized_hub_model_is_refused_before_anything_large_is_fetched(hub: FakeHub) -> None:
    hub.files.append("hf_quant_config.json")
    with pytest.raises(ModelRefused, match=r"there is a hf_quant_config\.json"):
        resolve("org/model")
    hub.files.pop()
    (hub.snapshot / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelRefused, match=r"quant_method: fp8"):
        resolve("org/model")


def test_a_hub_model_with_pickles_only_is_refused_before_anything_large_is_fetched(hub: FakeHub) -> None:
    hub.files = ["config.json", "pytorch_model.bin"]
    with pytest.raises(ModelRefused, match=r"pickles \(pytorch_model\.bin\)"):
        resolve("org/model")
    assert len(hub.asked) == 1


def test_offline_what_was_fetched_before_is_used(hub: FakeHub) -> None:
    fetch_weights(resolve("org/model"))
    hub.is_offline = True
    assert resolve("org/model").revision == COMMIT


def test_an_unknown_name_says_that_it_is_neither_folder_nor_hub_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelRefused, match="neither a local folder nor a model the hub gives us"):
        resolve("no-such-org/no-such-model")


def test_a_name_the_hub_cannot_have_is_refused() -> None:
    with pytest.raises(ModelRefused, match="neither a local folder nor a model the hub gives us"):
        resolve("no such model!")
