"""A real network, its steps begun while the one before is computed: the tokens that it gives one by one.

On a CPU a step is done when it is begun; what is tested is that it is given the right tokens, places, blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.engine.engine_core import EngineCore
from replica.runners import model_runner
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.fakes.recording import OperationRecorder
from tests.family_engines import SETTINGS, Runners, Setting
from tests.model_families import FAMILIES
from tests.property.test_decode_graphs import load

PROMPTS = families.prompts()
USUAL = ("chunked-blocks-of-4", "swapped")
MORE = ("cache-on", "preempted", "preempted-blocks-of-4", "host-memory", "screened")
AHEAD = [
    pytest.param(
        replace(each, async_scheduling=True),
        id=each.name,
        marks=[pytest.mark.long] if each.name in MORE else [],
    )
    for each in SETTINGS
    if each.name in USUAL + MORE
]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    """A window of 10 tokens."""
    family = next(each for each in FAMILIES if each.name == "mistral")
    folder = families.save(family, tmp_path_factory.mktemp(family.name))
    runners = Runners(folder, "cpu")
    yield runners
    runners.close()


@pytest.fixture(scope="module")
def wanted(runners: Runners) -> list[tuple[int, ...]]:
    """What the engine says one by one: `test_exactness.py` holds that against `generate`."""
    engine = runners.engine(Setting("one by one", prefix_caching=False))
    return [answer.token_ids for answer in engines.answer_all(engine, PROMPTS)]


@pytest.mark.parametrize("setting", AHEAD)
def test_greedy_output_is_what_it_is_one_by_one(
    runners: Runners, wanted: list[tuple[int, ...]], setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[EngineCore] = []
    build = engines.engine_over
    monkeypatch.setattr(engines, "engine_over", lambda *given: built.append(build(*given)) or built[-1])
    engines.check_family(runners, setting, wanted)
    assert len(built) == 2
    assert all(engine.stats().steps_ahead > 5 for engine in built)


UNSEEN = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, min_tokens=4, stop_token_ids=tuple(range(0, 1800, 9))),
    SamplingParams(max_tokens=12, temperature=1.0, top_k=30, min_p=0.01, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.0, logit_bias=((5, 4.0),), ignore_eos=True),
]
# Before a step after one of these is begun, its token has to be known.
SEEN = [
    SamplingParams(max_tokens=3, temperature=0.7, frequency_penalty=1.0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.0, logprobs=3, prompt_logprobs=1, ignore_eos=True),
]


def mixed_answers(
    runner: ModelRunner, setting: Setting, kinds: list[SamplingParams]
) -> tuple[list[Any], EngineCore]:
    """Late arrivals, one cancelled on the way; tokens, reasons and what was told of logits."""
    engine = engines.engine_over(runner, setting)
    coming = [
        GenerateRequest(RequestId(f"q{i}"), array("i", prompt), len(prompt), kinds[i % len(kinds)], 50 + i)
        for i, prompt in enumerate(PROMPTS)
    ]
    taken = [engine.submit(request) for request in coming[:5]]
    late, steps = coming[5:], 0
    while engine.has_work or late:
        if late and steps % 2:
            taken.append(engine.submit(late.pop(0)))
        if steps == 6:
            engine.cancel(RequestId("q2"))
        for progress in engine.step():
            assert progress.error is None
        engines.check_pool(engine)
        steps += 1
    told = []
    for request in taken:
        if request.request_id != "q2":
            log = request.logprobs
            both = None if log is None else (log.take_drawn(99), log.take_prompt())
            told.append((request.token_ids.tolist(), request.finish_reason, both))
    return told, engine


@pytest.mark.parametrize(("kinds", "wastes"), [(UNSEEN, True), (UNSEEN + SEEN, False)], ids=["unseen", "all"])
def test_requests_of_every_kind_beside_each_other(
    runners: Runners, kinds: list[SamplingParams], wastes: bool
) -> None:
    setting = Setting("mixed", block_size=4, max_batched_tokens=60)
    runner = runners.get(setting.block_size, setting.num_blocks)
    alone, _ = mixed_answers(runner, setting, kinds)
    told, engine = mixed_answers(runner, replace(setting, async_scheduling=True), kinds)
    assert [each[:2] for each in told] == [each[:2] for each in alone]
    for (*_, found), (*_, expected) in zip(told, alone, strict=True):
        if expected is not None:  # in batches of other shapes, so up to rounding
            for ours, theirs in zip(found, expected, strict=True):
                assert list(ours.top_ids) == list(theirs.top_ids)
                assert list(ours.chosen) == pytest.approx(list(theirs.chosen), abs=1e-4)
    assert any(each[2] is not None for each in told) != wastes
    assert engine.stats().steps_ahead > 0
    assert (engine.stats().wasted_tokens > 0) >= wastes


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_recorded_steps_take_the_tokens_that_only_the_device_has(runners: Runners, heat: float) -> None:
    folder, recorder = runners._folder, OperationRecorder()
    setting = Setting("graphs", block_size=4, num_blocks=128, max_batched_tokens=48, max_running=12)
    plain, recorded = load(folder), load(folder, recorder)
    sampling = SamplingParams(max_tokens=9, temperature=heat, ignore_eos=True)
    try:
        one_by_one = engines.answer_all(
            engines.engine_over(plain, setting), PROMPTS, sampling=sampling, at_once=4, seed=5
        )
        engine = engines.engine_over(recorded, replace(setting, async_scheduling=True))
        assert engines.answer_all(engine, PROMPTS, sampling=sampling, at_once=4, seed=5) == one_by_one
        assert engine.stats().steps_ahead > 5
        assert recorded._graphs is not None
        assert recorded._graphs.num_replays > 5
    finally:
        plain.close()
        recorded.close()


def test_a_step_after_one_that_failed_fails_for_the_same_reason(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting("failing", block_size=4, async_scheduling=True)
    runner = runners.get(setting.block_size, setting.num_blocks)
    engine = engines.engine_over(runner, setting)
    for index, prompt in enumerate(PROMPTS[:3]):
        name = RequestId(f"q{index}")
        engine.submit(GenerateRequest(name, array("i", prompt), len(prompt), UNSEEN[0], 0))
    engine.step()
    assert engine.stats().steps_ahead == 1
    step_batch = model_runner.StepBatch

    def failing(*_: Any) -> Any:
        raise RuntimeError("no step today")

    monkeypatch.setattr(model_runner, "StepBatch", failing)
    failed = [progress for _ in range(3) for progress in engine.step() if progress.error is not None]
    assert len(failed) == 3
    assert engine.stats().cache.used == 0
    monkeypatch.setattr(model_runner, "StepBatch", step_batch)
    assert len(engines.answer_all(engine, PROMPTS[:3])) == 3
