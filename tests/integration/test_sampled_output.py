"""Sampled output depends on prompt, seed and sampling alone: not on batch, chunks, cache or preemption."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import SETTINGS, Runners, Setting
from tests.model_families import FAMILIES, MAX_NEW_TOKENS

PROMPTS = families.prompts()
# Hot enough that any slip in a draw's seed or position would show.
SAMPLING = {
    "plain": SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=1.0, ignore_eos=True),
    "filtered": SamplingParams(
        max_tokens=MAX_NEW_TOKENS, temperature=1.5, top_p=0.9, top_k=40, ignore_eos=True
    ),
}
ALONE = Setting("alone", prefix_caching=False)


@dataclass(frozen=True, slots=True)
class Case:
    runners: Runners
    sampling: SamplingParams
    alone: list[tuple[int, ...]]  # each prompt's answer in an engine of its own


class Shelf:
    """Each family's runners, saved when it is first needed: how it is sampled is the engine's alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runners: dict[str, Runners] = {}

    def get(self, name: str) -> Runners:
        if name not in self._runners:
            family = next(family for family in FAMILIES if family.name == name)
            self._runners[name] = Runners(families.save(family, self._folder / name), "cpu")
        return self._runners[name]

    def close(self) -> None:
        for runners in self._runners.values():
            runners.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path_factory.mktemp("families"))
    yield shelf
    shelf.close()


CASES = [
    pytest.param(("llama", "plain"), id="llama-plain"),
    pytest.param(("llama", "filtered"), id="llama-filtered"),
    pytest.param(("gemma2", "plain"), id="gemma2-plain", marks=pytest.mark.long),
    pytest.param(("qwen3_moe", "filtered"), id="qwen3_moe-filtered", marks=pytest.mark.long),
]
# A draw goes by request and position, whatever a setting cuts, finds, takes away, copies back or screens;
# what a filter leaves follows from a row's logits. The rest is in the broad suite.
MEETS = {
    "llama-plain": ("cache-on", "chunked-blocks-of-4", "preempted-blocks-of-4", "swapped", "screened"),
    "llama-filtered": ("preempted-blocks-of-4", "screened"),
    "gemma2-plain": ("preempted-blocks-of-4", "swapped"),
    "qwen3_moe-filtered": ("preempted-blocks-of-4", "screened"),
}


def _in_settings() -> Iterator[Any]:
    for case in CASES:
        for setting in SETTINGS:
            is_broad = setting.name not in MEETS[str(case.id)]
            marks = (pytest.mark.long, pytest.mark.broad) if is_broad else case.marks
            yield pytest.param(*case.values, setting, id=f"{case.id}-{setting.name}", marks=marks)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, shelf: Shelf) -> Case:
    name, drawn = request.param
    runners, sampling = shelf.get(name), SAMPLING[drawn]
    engine = runners.engine(ALONE)
    alone = [
        engines.answer_all(engine, [prompt], sampling=sampling, seed=100 + index)[0].token_ids
        for index, prompt in enumerate(PROMPTS)
    ]
    return Case(runners, sampling, alone)


@pytest.mark.parametrize(("case", "setting"), [*_in_settings()], indirect=["case"])
def test_the_same_seed_says_the_same_however_it_is_computed(case: Case, setting: Setting) -> None:
    engine = case.runners.engine(setting)
    for when, at_once in (("cold", None), ("warm", None), ("late", 2)):
        answers = engines.answer_all(engine, PROMPTS, sampling=case.sampling, at_once=at_once, seed=100)
        engines.check_answers(answers, case.alone, when)
    if setting.preempts:
        assert engine.stats().preemptions > 0


def test_seeds_tell_identical_prompts_apart(case: Case) -> None:
    twins = [index for index, prompt in enumerate(PROMPTS) if PROMPTS.count(prompt) == 2]
    assert len(twins) == 4
    answers = {case.alone[index] for index in twins}
    assert len(answers) == 4


def test_a_continued_stream_draws_what_the_lost_replica_would_have_drawn(case: Case) -> None:
    """The router sends prompt and tokens so far to another replica: same seed, same positions."""
    for index in (0, 3, 7):
        prompt, whole = PROMPTS[index], case.alone[index]
        for so_far in (1, 5, MAX_NEW_TOKENS - 1):
            engine = case.runners.engine(SETTINGS[0])
            request = GenerateRequest(
                RequestId("again"),
                array("i", prompt + whole[:so_far]),
                len(prompt),
                case.sampling,
                seed=100 + index,
                attempt=1,
            )
            assert engine.complete([request])[0].token_ids == whole


def test_min_tokens_hold_across_chunks_and_batches(case: Case) -> None:
    """A stop id is masked until enough was said; whoever runs beside does not matter."""
    runners = case.runners
    first = engines.answer_all(runners.engine(ALONE), [PROMPTS[0]])[0].token_ids
    sampling = replace(SAMPLING["plain"], temperature=0.0, stop_token_ids=tuple(set(first[:8])), min_tokens=8)
    alone = engines.answer_all(runners.engine(ALONE), [PROMPTS[0]], sampling=sampling)[0].token_ids
    assert len(alone) >= 8
    assert not set(alone[:8]) & set(first[:8])
    crowd = engines.answer_all(runners.engine(SETTINGS[-1]), PROMPTS, sampling=sampling)
    assert crowd[0].token_ids == alone
