"""The real runner around its steps: what it tells, warming up, giving memory back, threads, number types."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.messages import SamplingParams
from replica.attention.kv_pages import ATTRIBUTE
from replica.config import ReplicaConfig
from replica.models.model_source import resolve
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import Runners, Setting, answer_all, engine_over
from tests.model_families import FAMILIES, MAX_NEW_TOKENS

PROMPTS = families.prompts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(FAMILIES[0], tmp_path_factory.mktemp("llama"))


@pytest.fixture
def opened() -> Iterator[list[ModelRunner]]:
    runners: list[ModelRunner] = []
    yield runners
    for runner in runners:
        runner.close()


def load(folder: Path, opened: list[ModelRunner], **settings: Any) -> ModelRunner:
    config = ReplicaConfig(**{"device": "cpu", "block_size": 4, "num_blocks": 128, **settings})
    opened.append(ModelRunner.load(config, resolve(str(folder))))
    return opened[-1]


def test_info_tells_what_was_loaded(folder: Path, opened: list[ModelRunner]) -> None:
    info = load(folder, opened, max_model_len=100).info
    assert (info.device, info.attention_backend, info.kv_dtype) == ("cpu", "gather_sdpa", "float32")
    assert (info.num_blocks, info.block_size, info.max_model_len) == (128, 4, 100)
    assert info.vocab_size == families.VOCABULARY
    assert info.kv_bytes_per_block == 4 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dim, bytes
    assert info.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"eos_token_id": 5}, {5}),
        ({"eos_token_id": [5, 9]}, {5, 9}),
        ({"eos_token_id": []}, {7}),
        ({"eos_token_id": None}, {7}),
        ({}, {7}),
        (None, {7}),
    ],
)
def test_end_of_sequence_ids_come_from_the_generation_config_if_it_names_any(
    tmp_path: Path, opened: list[ModelRunner], content: dict[str, Any] | None, expected: set[int]
) -> None:
    """Else from config.json: transformers' `generate` would go on to the last token that it may write."""
    folder = families.save(FAMILIES[0], tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": 7})
    )
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(json.dumps(content))
    assert load(folder, opened).info.eos_token_ids == expected


@pytest.mark.parametrize("num_blocks", [1, 2, 300])
def test_warming_up_fits_any_pool_and_leaves_no_trace(
    folder: Path, opened: list[ModelRunner], num_blocks: int
) -> None:
    runner = load(folder, opened, num_blocks=num_blocks)
    setting = Setting("warm", block_size=4, num_blocks=num_blocks)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    before = answer_all(engine_over(runner, setting), [PROMPTS[13][:2]], sampling=sampling)
    assert runner.warm_up() > 0.0
    assert runner.warm_up() > 0.0
    assert answer_all(engine_over(runner, setting), [PROMPTS[13][:2]], sampling=sampling) == before


def test_close_gives_pages_and_model_back(folder: Path) -> None:
    """A refused model, or one that is replaced, must not keep its gigabytes."""
    config = ReplicaConfig(device="cpu", block_size=4, num_blocks=128)
    runner = ModelRunner.load(config, resolve(str(folder)))
    answer_all(engine_over(runner, Setting("close", block_size=4, num_blocks=128)), PROMPTS)
    layer = runner._model.model.layers[0]
    (pages,) = (module.__dict__[ATTRIBUTE] for module in layer.modules() if ATTRIBUTE in module.__dict__)
    held = [weakref.ref(layer), weakref.ref(pages.keys)]
    del layer, pages
    runner.close()
    runner.close()
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_the_thread_that_steps_uses_the_threads_asked_for(folder: Path, opened: list[ModelRunner]) -> None:
    """torch keeps the count per thread: the engine's is not the one that loaded."""
    runner = load(folder, opened, torch_threads=1)
    seen: list[int] = []

    def step() -> None:
        torch.set_num_threads(2)
        answer_all(engine_over(runner, Setting("threads", block_size=4, num_blocks=128)), PROMPTS[:1])
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert seen == [1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers_warm_as_cold(folder: Path, opened: list[ModelRunner], dtype: str) -> None:
    """Not exactly `generate`'s answers (rounding differs with the shapes), but complete and repeatable."""
    runner = load(folder, opened, dtype=dtype)
    assert runner.info.kv_dtype == dtype
    assert runner.info.kv_bytes_per_block == 4 * 2 * 2 * 2 * 16 * 2
    setting = Setting("half", block_size=4, num_blocks=128)
    first, second = (answer_all(engine_over(runner, setting), PROMPTS) for _ in range(2))
    assert first == second
    assert {len(answer.token_ids) for answer in first} == {MAX_NEW_TOKENS}


def test_the_embedded_model_is_exact_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path))
    folder = resolve("tiny").folder
    runners = Runners(folder, "cpu")
    wanted = families.expected(folder, torch.device("cpu"))
    engines.check_variety(wanted)
    engines.check_family(runners, Setting("tiny", block_size=4, max_batched_tokens=23), wanted)
    runners.close()
