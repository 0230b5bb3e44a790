"""Screening greedy tokens in a real model changes none of them, whatever else is in the step.

That all families answer as `generate` does with it is in `test_exactness.py`.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.attention import kv_pages
from replica.config import ReplicaConfig
from replica.layers import screened_head
from replica.layers.coarse_product import find_bfloat16
from replica.layers.screen_costs import ProductCost, ScreenCosts
from replica.layers.screened_head import RowsAnswered, RowsAsked
from replica.models.model_source import NotEnoughMemory, resolve
from replica.runners import load_choices
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import GREEDY, Runners, Setting, engine_over
from tests.model_families import FAMILIES, MAX_NEW_TOKENS

pytestmark = pytest.mark.skipif(find_bfloat16() is None, reason="no bfloat16 product here")

PROMPTS = families.prompts()
SCREENED = Setting("screened", block_size=4, greedy_screen="on")
NOT_SCREENED = replace(SCREENED, greedy_screen="off")
MIXED = (
    GREEDY,
    SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=1.0, ignore_eos=True),
    SamplingParams(
        max_tokens=MAX_NEW_TOKENS, temperature=0.0, stop_token_ids=tuple(range(500)), min_tokens=9
    ),
    SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=1.5, top_p=0.9, top_k=40, ignore_eos=True),
)


def by_name(name: str) -> Any:
    return next(family for family in FAMILIES if family.name == name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(by_name("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def runners(folder: Path) -> Iterator[Runners]:
    runners = Runners(folder, "cpu")
    yield runners
    runners.close()


def watch(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[RowsAsked, RowsAnswered | None]]:
    """What is asked of the runner's output layer, and what it says."""
    head = runner._drawer._head
    assert head is not None
    seen: list[tuple[RowsAsked, RowsAnswered | None]] = []
    original = head.answer

    def answer(asked: RowsAsked, forward: Any) -> RowsAnswered | None:
        answered = original(asked, forward)
        seen.append((asked, answered))
        return answered

    monkeypatch.setattr(head, "answer", answer)
    return seen


def answers(runner: ModelRunner, setting: Setting) -> list[tuple[int, ...]]:
    """Greedy, sampled and held-back requests side by side, in chunks."""
    engine = engine_over(runner, replace(setting, max_batched_tokens=23))
    taken = [
        engine.submit(
            GenerateRequest(
                RequestId(f"q{index}"), array("i", prompt), len(prompt), MIXED[index % len(MIXED)], index
            )
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    while engine.has_work:
        for progress in engine.step():
            assert progress.error is None
    return [tuple(request.token_ids[request.num_prompt_tokens :]) for request in taken]


def test_in_a_mixed_step_everybody_gets_what_he_would_have_got(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, screening = (
        runners.get(setting.block_size, setting.num_blocks, setting.greedy_screen)
        for setting in (NOT_SCREENED, SCREENED)
    )
    seen = watch(screening, monkeypatch)
    assert answers(screening, SCREENED) == answers(plain, NOT_SCREENED)
    assert any(asked.largest and asked.others for asked, _ in seen)
    assert any(answered is not None and answered.tokens and answered.computed for _, answered in seen)


def test_a_cap_that_makes_equals_of_the_largest_logits_costs_a_second_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma2's tanh rounds to the cap itself: which token is first among those is all that counts then."""
    gemma2 = by_name("gemma2")
    capped = replace(gemma2, settings={**gemma2.settings, "final_logit_softcapping": 0.7})
    runners = Runners(families.save(capped, tmp_path / "model"), "cpu")
    seen = watch(runners.get(4, engines.ROOMY_BLOCKS, "on"), monkeypatch)
    wanted = families.expected(tmp_path / "model", torch.device("cpu"))
    engines.check_family(runners, SCREENED, wanted)
    assert any(answered is None for _, answered in seen)
    runners.close()


def test_a_step_that_draws_nothing_computes_no_logits(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runners.get(SCREENED.block_size, SCREENED.num_blocks, SCREENED.greedy_screen)
    head = runner._drawer._head
    assert head is not None
    head._costs = ScreenCosts(ProductCost(1.0, 0.02), ProductCost(0.5, 0.01))  # as where it pays
    seen = watch(runner, monkeypatch)
    try:
        engines.answer_all(engine_over(runner, replace(SCREENED, max_batched_tokens=23)), [PROMPTS[5]])
    finally:
        head._costs = None
    chunks = [answered for asked, answered in seen if not asked.largest]
    assert chunks
    assert all(answered is not None and answered.computed == () for answered in chunks)


def load(folder: Path, **settings: Any) -> ModelRunner:
    config = ReplicaConfig(**{"device": "cpu", "block_size": 4, "num_blocks": 16, **settings})
    return ModelRunner.load(config, resolve(str(folder)))


def layer_bytes() -> int:
    return families.VOCABULARY * 64 * 4


def test_memory_for_it_is_asked_for_or_gone_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pays = ScreenCosts(ProductCost(1.0, 0.02), ProductCost(0.5, 0.01))
    monkeypatch.setattr(screened_head, "_measured", lambda *_: pays)
    needed = layer_bytes() * 7 // 4  # nobody else has the weight
    blocks = 16 * load(folder, greedy_screen="off").info.kv_bytes_per_block
    for free, mode, screens in (
        (4 * needed + blocks, "auto", True),
        (4 * needed + blocks - 4, "auto", False),
        (needed, "on", True),
    ):
        monkeypatch.setattr(kv_pages, "free_bytes", free_in_turn(1 << 40, free))
        runner = load(folder, greedy_screen=mode)
        assert (runner._drawer._head is not None) is screens
        runner.close()
    monkeypatch.setattr(kv_pages, "free_bytes", free_in_turn(1 << 40, needed - 1))
    with pytest.raises(NotEnoughMemory, match="greedy_screen: on"):
        load(folder, greedy_screen="on")


def free_in_turn(for_weights: int, for_screen: int) -> Any:
    """What is free when the weights are loaded, then when the screen is built, then whatever comes."""
    answers = iter([for_weights, for_screen])
    return lambda _device: next(answers, 1 << 40)


def test_blocks_are_counted_after_it_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    original = load_choices.screen_head

    def screen_head(*arguments: Any, **options: Any) -> Any:
        built.append(True)
        return original(*arguments, **options)

    def choose(*_: Any) -> int:
        assert built
        return 16

    monkeypatch.setattr(load_choices, "screen_head", screen_head)
    monkeypatch.setattr(load_choices, "choose_num_blocks", choose)
    load(folder, greedy_screen="on").close()


def test_off_and_half_precision_leave_the_output_layer_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asked for it by name is told."""
    for settings, is_told in (
        ({"greedy_screen": "off"}, False),
        ({"greedy_screen": "auto", "dtype": "bfloat16"}, False),
        ({"greedy_screen": "on", "dtype": "bfloat16"}, True),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="replica"):
            runner = load(folder, **settings)
        assert runner._drawer._head is None
        runner.close()
        assert ("greedy tokens are not screened" in caplog.text) is is_told
