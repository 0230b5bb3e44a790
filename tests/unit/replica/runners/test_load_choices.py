"""How much of a card's memory is left to steps, found out without one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from cache.errors import ConfigError
from replica.attention import interface, kv_pages
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig
from replica.layers import decoder_block
from replica.models import model_probe
from replica.models.model_source import ModelRefused, NotEnoughMemory, ResolvedModel, resolve, stored_dtype
from replica.runners import load_choices, model_runner
from replica.runners.model_runner import ModelRunner
from tests.layer_models import model_of

SHAPES = [LayerShape(2, 16, 16)] * 2
CUDA = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings", "max_model_len", "step"),
    [
        ({"max_batched_tokens": 64, "max_running": 8}, 1000, (72, 8)),
        ({"max_batched_tokens": 64, "max_running": 8}, 20, (72, 8)),  # short sequences fill a step together
        ({"max_batched_tokens": 64, "max_running": 2}, 20, (40, 2)),  # all that there can be
    ],
)
def test_a_full_step_is_measured_whoever_it_is_of(
    settings: dict[str, int], max_model_len: int, step: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def step_bytes(_model: object, num_tokens: int, num_rows: int, _max_model_len: int) -> int:
        measured.append((num_tokens, num_rows))
        return 0

    monkeypatch.setattr(load_choices, "step_bytes", step_bytes)
    config = ReplicaConfig(num_blocks=4, **settings)  # type: ignore[arg-type]
    assert load_choices.choose_num_blocks(config, "made up", model_of("llama"), SHAPES, max_model_len) == 4
    assert measured == [step]


@pytest.mark.parametrize(
    ("version", "cuda", "why"),
    [("2.13.0+cpu", None, r": torch 2\.13\.0\+cpu is built for CPUs alone"), ("2.13.0", "13.0", "")],
)
def test_where_torch_sees_no_card_it_is_said_why(
    version: str, cuda: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It advised auto, also where auto had become cuda: where Ray has GPUs and torch is built for CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ConfigError, match=rf"torch sees no CUDA device{why}; device: cpu does without$"):
        load_choices.choose_device("cuda")
    assert load_choices.choose_device("auto") == load_choices.choose_device("cpu") == torch.device("cpu")


def test_a_model_that_names_no_length_is_asked_for_one() -> None:
    resolved = ResolvedModel("here", Path("/here"), "m", "0", hub_id=None, max_model_len=None)
    text = SimpleNamespace()  # some families do not have the attribute
    config = SimpleNamespace(get_text_config=lambda: text)
    with pytest.raises(ConfigError, match="max_model_len = null: here does not say its limit: set one"):
        load_choices.choose_length(ReplicaConfig(), resolved, config)
    assert load_choices.choose_length(ReplicaConfig(max_model_len=64), resolved, config) == 64


def test_on_a_card_blocks_get_their_part_of_what_weights_and_a_full_step_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 64 MiB with 10 of weights: a step that takes 4 more at its peak is to have 6."""
    taken = {"now": 10 * MIB, "peak": 50 * MIB}  # of whatever was computed before

    def run_without_pages(*step: object) -> None:
        assert step[1:] == (72, 8, 1000)
        taken["peak"] = max(taken["peak"], 14 * MIB)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: taken["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: taken["peak"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _device: taken.update(peak=taken["now"])
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (54 * MIB, 64 * MIB))
    monkeypatch.setattr(model_probe, "run_without_pages", run_without_pages)
    model = SimpleNamespace(device=CUDA, dtype=torch.bfloat16)
    config = ReplicaConfig(max_batched_tokens=64, max_running=8, kv_memory_fraction=0.5)
    # A block: 16 tokens, 2 layers, keys and values, 2 heads of 16, 2 bytes = 4 KiB.
    num_blocks = load_choices.choose_num_blocks(config, "made up", model, SHAPES, 1000)
    assert num_blocks == (54 - 6) * MIB // 2 // 4096


@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_a_step_has_more_tokens_than_a_sequence_may(model_type: str) -> None:
    """opt has a table of positions, and an end of it."""
    model_probe.run_without_pages(model_of(model_type), num_tokens=600, num_rows=3, max_model_len=256)


def test_a_step_that_does_not_fit_at_all_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_bytes(*_: object) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(load_choices, "step_bytes", step_bytes)
    config = ReplicaConfig(max_batched_tokens=100_000)
    with pytest.raises(ConfigError, match=r"max_batched_tokens.*100064 tokens in a step do not fit"):
        load_choices.choose_num_blocks(config, "made up", model_of("llama"), SHAPES, 1 << 17)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (model_probe, "run"),
        (interface, "probed_layers"),
        (decoder_block, "fuse_blocks"),
        (model_runner, "KVPages"),
    ],
    ids=["its own forward", "the probe", "comparing layers", "the pages"],
)
def test_memory_that_runs_out_says_nothing_of_the_model(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card with room for the weights and little more was told that the family cannot be served, or nothing
    but a traceback."""

    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.")

    monkeypatch.setattr(module, name, run_out)
    told = r"made up.*needs more memory than cpu has beside its weights: CUDA out of memory\. Tried"
    with pytest.raises(ModelRefused, match=told):
        ModelRunner.over(model_of("llama"), ReplicaConfig(num_blocks=16), "made up", max_model_len=64)


def test_a_model_that_does_not_fit_on_its_way_to_the_card_is_refused(
    stored: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free was enough a moment ago: another process has taken it."""

    def run_out(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(model_runner, "load_model", run_out)
    config = ReplicaConfig(device="cpu", max_model_len=64)
    with pytest.raises(ModelRefused, match=r"needs more memory than cpu has .*CUDA error: out of memory"):
        ModelRunner.load(config, stored)


def test_any_other_error_is_told_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="no kernel image"), load_choices.refusals("made up", CUDA):
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("said", [{}, {"dtype": "float16"}, {"torch_dtype": "float32"}, {"dtype": "float64"}])
def test_auto_is_the_type_that_routers_are_told_of(said: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **said}))
    save_file({"weight": np.zeros((2, 2), dtype=np.float32)}, tmp_path / "model.safetensors")
    model = resolve(str(tmp_path))
    assert load_choices.choose_dtype("auto", CUDA, model) == getattr(torch, stored_dtype(model))
    assert load_choices.choose_dtype("auto", torch.device("cpu"), model) == torch.float32


@pytest.mark.parametrize(
    ("dtype", "is_refused"),
    [(torch.bfloat16, True), (torch.float32, False)],  # mapped from its file, and copied from there
)
def test_what_is_converted_on_its_way_to_a_card_needs_room_on_the_host(
    stored: ResolvedModel, dtype: torch.dtype, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the system ends the process in the middle of loading, and nobody says why."""
    monkeypatch.setattr(kv_pages, "free_bytes", lambda _device: 100 * MIB)
    monkeypatch.setattr(load_choices, "free_host_bytes", lambda: MIB)
    if not is_refused:
        load_choices.check_memory_for_weights(ReplicaConfig(), stored, CUDA, dtype)
        return
    told = r"needs 2\.0 MiB of memory on the host for its weights as bfloat16, .* cuda:0, 1\.0 MiB are free"
    with pytest.raises(NotEnoughMemory, match=told):
        load_choices.check_memory_for_weights(ReplicaConfig(), stored, CUDA, dtype)


def test_who_has_a_part_of_a_card_is_told_that_it_is_a_part(
    stored: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an empty card is less than what is free on it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (6 * MIB, 6 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    load_choices.check_memory_for_weights(ReplicaConfig(), stored, CUDA, torch.float32)
    told = r"needs 4\.0 MiB of memory on cuda:0 \(device_share is 0\.5\) for its weights, 3\.0 MiB are free"
    with pytest.raises(NotEnoughMemory, match=told):
        load_choices.check_memory_for_weights(ReplicaConfig(device_share=0.5), stored, CUDA, torch.float32)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizers", "expected"),
    [
        ([5, 9], 7, None, {5, 9}),
        (None, 7, None, {7}),
        (None, None, None, set()),
        ([5, 9], 7, 2, {2, 5, 9}),
        (5, 7, 2, {2, 5}),
        (None, 7, 2, {2, 7}),
        ([], None, 2, {2}),
        (None, None, 0, {0}),
        (2, 7, 2, {2}),
    ],
)
def test_a_tokenizers_end_ends_an_answer_beside_the_models(
    generation: object, config: object, tokenizers: int | None, expected: set[int]
) -> None:
    """Answers of a base model's fine-tune that ends its turns with a token of its own ran on to the limit."""
    text_config = SimpleNamespace(eos_token_id=config)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation),
        config=SimpleNamespace(get_text_config=lambda: text_config),
    )
    assert load_choices.eos_token_ids(model, tokenizers) == expected
