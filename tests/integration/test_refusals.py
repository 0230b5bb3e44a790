"""What cannot be served exactly is refused at start, with the reason: families, checkpoints, memory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.errors import ConfigError
from replica.attention import kv_pages, triton_paged
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig
from replica.models.config_rules import check_config
from replica.models.model_source import ModelRefused, NotEnoughMemory, resolve
from replica.runners import model_runner
from replica.runners.model_runner import ModelRunner
from tests import model_families
from tests.model_families import COMMON, FAMILIES, Family

UNSIZED = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "intermediate_size")
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
DYNAMIC = {
    "rope_parameters": {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    },
}
WINDOW_IN_A_MASK = (  # longer than the self-check's prompt
    Family("phimoe", "phimoe", {"sliding_window": 60, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "qwen2_moe",
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 60,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
)
QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LLAMA4 = {
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "head_dim": 16,
    "layer_types": ["full_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "floor_scale": 50,
}

REFUSED = [
    (Family("linear-attention", "qwen3_next", QWEN3_NEXT), r"layers of type linear_attention"),
    (Family("recurrent", "mamba", without=UNSIZED), r"layers of type linear_attention"),
    (
        Family("recurrent-unmarked", "rwkv", {"max_position_embeddings": 64}, UNSIZED[:2]),
        r"recurrent|Attention",
    ),
    (
        Family(
            "convolutions",
            "lfm2",
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        ),
        r"layers of type conv",
    ),
    (
        Family("chunked-attention", "llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 64}),
        r"layers of type chunked_attention",
    ),
    (
        Family("scaled-by-place", "llama4_text", LLAMA4),
        r"place in the step .* set that to false .* than 50 tok",
    ),
    (Family("longrope", "phi3", LONGROPE), r"longrope .* beyond 64 tokens; set max_model_len to 64 or less"),
    (
        Family("dynamic-rope", "llama", DYNAMIC),
        r"dynamic .* beyond 64 tokens; set max_model_len to 64 or less",
    ),
    (
        Family("not-on-the-interface", "falcon", without=("num_key_value_heads", "intermediate_size")),
        r"does not go through transformers' AttentionInterface",
    ),
    (Family("a-mask-of-its-own", "doge"), r"builds an attention mask of its own"),
    (Family("attends-twice", "diffllama"), r"attends more than once per layer"),
    (
        Family("not-causal", "bert", {"is_decoder": False}, without=("num_key_value_heads",)),
        r"is not causal",
    ),
]


FOUND_BY_LOADING = ("a-mask-of-its-own", "attends-twice", "not-causal")


def load(folder: Path, **settings: Any) -> ModelRunner:
    config = ReplicaConfig(**{"model": str(folder), "device": "cpu", "num_blocks": 32, **settings})
    return ModelRunner.load(config, resolve(str(folder)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be served; tests damage copies of it."""
    return model_families.save(FAMILIES[0], tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- families -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "reason"), REFUSED, ids=[family.name for family, _ in REFUSED])
def test_a_family_that_would_not_be_exact_is_refused_with_the_reason(
    family: Family, reason: str, tmp_path: Path
) -> None:
    folder = model_families.save(family, tmp_path / "model")
    with pytest.raises(ModelRefused, match=reason) as refusal:
        load(folder)
    assert refusal.value.field == "model"
    assert refusal.value.value == str(folder)
    if (
        family.name not in FOUND_BY_LOADING
    ):  # then `deploy check` says the same, and nothing was loaded for it
        with pytest.raises(ModelRefused, match=f"^{re.escape(str(refusal.value))}$"):
            check_config(resolve(str(folder)), max_model_len=None)


@pytest.mark.parametrize(
    "family",
    [
        Family("bloom", "bloom", {"n_layer": 2, "n_head": 4}, without=(*UNSIZED, "num_hidden_layers")),
        Family(
            "mpt",
            "mpt",
            {"d_model": 64, "n_heads": 4, "n_layers": 2},
            without=tuple(COMMON.keys() - {"vocab_size", "eos_token_id"}),
        ),
    ],
    ids=lambda family: family.name,
)
def test_a_family_without_a_length_limit_is_refused_whether_or_not_one_is_set(
    family: Family, tmp_path: Path
) -> None:
    """They do not have the config's attribute. Nobody is asked for a limit to hear then that it is no use."""
    folder = model_families.save(family, tmp_path / "model")
    for settings in ({}, {"max_model_len": 64}):
        with pytest.raises(ModelRefused, match="does not go through transformers' AttentionInterface"):
            load(folder, **settings)


@pytest.mark.parametrize(
    "settings", [LONGROPE, {**DYNAMIC, "max_position_embeddings": 64}], ids=["long", "dynamic"]
)
def test_length_dependent_rope_is_served_where_it_does_not_depend_on_length(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model_type = "phi3" if "rope_scaling" in settings else "llama"
    folder = model_families.save(Family("short", model_type, settings), tmp_path / "model")
    assert load(folder, max_model_len=64).info.max_model_len == 64


@pytest.mark.parametrize(
    "change", [{"attn_temperature_tuning": False}, {"no_rope_layers": [1, 1]}], ids=["off", "all-rotary"]
)
def test_layers_that_do_not_scale_attention_by_place_are_served(
    change: dict[str, Any], tmp_path: Path
) -> None:
    folder = model_families.save(Family("llama4", "llama4_text", {**LLAMA4, **change}), tmp_path / "model")
    assert load(folder).info.num_blocks == 32


def test_attention_scaled_by_place_is_refused_for_short_sequences_too(tmp_path: Path) -> None:
    """Two of 30 tokens in a step: the second's places are 30 to 59, so it had another answer."""
    folder = model_families.save(Family("llama4", "llama4_text", LLAMA4), tmp_path / "model")
    with pytest.raises(ModelRefused, match="place in the step"):
        load(folder, max_model_len=49)


@pytest.mark.parametrize("family", WINDOW_IN_A_MASK, ids=lambda family: family.name)
def test_a_window_that_attention_is_not_told_of_is_refused_where_it_matters(
    family: Family, tmp_path: Path
) -> None:
    """Its prompts of more than 60 tokens were once answered as if it had no window."""
    folder = model_families.save(family, tmp_path / "model")
    with pytest.raises(ModelRefused, match=r"window of 60 tokens; set max_model_len to 60 or less"):
        load(folder)
    assert load(folder, max_model_len=60).info.max_model_len == 60


def test_more_positions_than_the_model_knows_are_refused_with_both_numbers(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 257: .* knows 256 positions"):
        load(llama, max_model_len=257)


def test_logits_that_differ_from_the_models_own_are_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of defence: a family whose attention we only believe to compute."""
    monkeypatch.setattr("replica.attention.interface.AttentionCall", _scaled_wrongly)
    with pytest.raises(ModelRefused, match=r"paged attention changes its logits by .* more than 0.001"):
        load(llama)


def _scaled_wrongly(**values: Any) -> Any:
    from replica.attention.backend import AttentionCall

    return AttentionCall(**{**values, "scale": values["scale"] * 1.1})


def test_without_a_cuda_device_cuda_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device = 'cuda': torch sees no CUDA device"):
        load(llama, device="cuda")


def test_a_backend_that_cannot_serve_the_layers_is_refused_before_weights_are_fetched(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers show their shapes without them."""

    def fetch_weights(_resolved: Any) -> None:
        raise AssertionError("gigabytes were fetched for nothing")

    def why_not(_device: Any, _dtype: Any, shapes: list[LayerShape]) -> str:
        return f"does not like these {shapes[0].key_dim} wide heads of {len(shapes)} layers"

    monkeypatch.setattr(model_runner, "fetch_weights", fetch_weights)
    monkeypatch.setattr(triton_paged, "why_not", why_not)
    with pytest.raises(
        ConfigError, match=r"attention_backend = 'triton': .* 16 wide heads of 2 layers; use auto"
    ):
        load(llama, attention_backend="triton")


# -- checkpoints --------------------------------------------------------------------------------------


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="this folder does not exist"):
        load(tmp_path / "nowhere")


def test_pickled_weights_are_refused_with_the_way_out(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"pickles \(pytorch_model.bin\).*safetensors only; convert"):
        load(copy)


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.0001], ids=["end", "half", "header"])
def test_a_truncated_file_is_refused(copy: Path, kept: float) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelRefused, match=r"model\.safetensors is damaged"):
        load(copy)


def test_missing_parameters_are_refused_and_named(copy: Path) -> None:
    """transformers would leave them at random and only warn."""
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lack 1 parameters .*model.layers.1.mlp.up_proj.weight"):
        load(copy)


def test_parameters_of_another_shape_are_refused(copy: Path) -> None:
    edit_config(copy, intermediate_size=80)
    with pytest.raises(
        ModelRefused, match=r"6 parameters have other shapes .*down_proj.weight: \[64, 96\], not \[64, 80\]"
    ):
        load(copy)


@pytest.mark.parametrize("extra", ["bias", "weight_scale", "lora_A.default.weight"])
def test_what_a_layer_has_and_would_not_read_is_refused_and_named(copy: Path, extra: str) -> None:
    """Scales, biases and adapters: transformers only warns, and the model answers as another one."""
    name = f"model.layers.1.self_attn.q_proj.{extra}"
    _add(copy, name)
    with pytest.raises(ModelRefused, match=rf"1 tensors that LlamaForCausalLM does not read \({name}"):
        load(copy)


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("model.layers.2.self_attn.q_proj.weight", True),  # a layer that predicts further tokens
        ("v_head.summary.weight", True),
        ("model.layers.1.self_attn.bias", True),  # a mask, in old checkpoints
        ("model.layers.1.self_attn.rotary_emb.inv_freq", False),
    ],
)
def test_what_stands_beside_the_layers_is_told_and_left_out(
    copy: Path, name: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _add(copy, name)
    assert load(copy).info.num_blocks == 32
    told = [record.first for record in caplog.records if record.msg == "weights that are not used"]
    assert told == ([[name]] if is_told else [])


def _add(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "nonsense"}, r"cannot be loaded: KeyError: 'nonsense'"),
        ({"num_attention_heads": 5}, r"cannot read a 'llama' config: .* not a multiple of .* heads \(5\)"),
        ({"num_hidden_layers": "two"}, r"cannot read a 'llama' config: .*'num_hidden_layers' expected int"),
    ],
    ids=["activation", "heads", "type"],
)
def test_whatever_transformers_raises_is_a_refusal(copy: Path, change: dict[str, Any], reason: str) -> None:
    edit_config(copy, **change)
    with pytest.raises(ModelRefused, match=reason):
        load(copy)


def test_code_from_the_models_own_repository_is_refused(copy: Path) -> None:
    (copy / "modeling_own.py").write_text("raise SystemExit('remote code was run')\n")
    edit_config(copy, model_type="own", auto_map={"AutoConfig": "modeling_own.OwnConfig"})
    with pytest.raises(
        ModelRefused, match="needs code from its own repository, and remote code is never run"
    ):
        load(copy)


def test_a_known_family_that_also_brings_code_is_served_with_transformers_own(copy: Path) -> None:
    (copy / "modeling_own.py").write_text("raise SystemExit('remote code was run')\n")
    edit_config(copy, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    assert load(copy).info.num_blocks == 32


# -- memory -------------------------------------------------------------------------------------------


def _only_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(kv_pages, "free_bytes", lambda device: free)


def test_too_little_memory_for_the_weights_names_both_numbers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_free(monkeypatch, 200 * 1024)
    with pytest.raises(
        NotEnoughMemory, match=r"needs 1\.\d MiB of memory on cpu for its weights, 200\.0 KiB are"
    ) as no:
        load(llama)
    assert no.value.needed_bytes > no.value.free_bytes == 200 * 1024


def test_too_little_memory_for_the_blocks_asked_for_names_both_numbers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_free(monkeypatch, 4 * 1024**2)
    # A block: 16 tokens, 2 layers, keys and values, 2 heads of 16, 4 bytes = 8 KiB.
    with pytest.raises(NotEnoughMemory, match=r"needs 7\.8 MiB .* for 1000 KV blocks, 4\.0 MiB are free"):
        load(llama, num_blocks=1000)


def test_too_little_memory_for_one_step_names_both_numbers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_free(monkeypatch, 2 * 1024**2)
    with pytest.raises(
        NotEnoughMemory, match=r"needs 128\.0 KiB .*kv_memory_fraction is 0.05.*102\.4 KiB are free"
    ):
        load(llama, num_blocks=None, kv_memory_fraction=0.05)


def test_blocks_come_from_the_allowed_share_of_free_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_free(monkeypatch, 8 * 1024**2)
    info = load(llama, num_blocks=None, kv_memory_fraction=0.5).info
    assert (info.num_blocks, info.kv_bytes_per_block) == (512, 8192)
