"""Log probabilities are the model's own: those of transformers' forward, however the engine computes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.messages import GenerateRequest, Logprobs, SamplingParams
from cache.types import RequestId
from replica.engine.completion import Completion
from replica.engine.engine_core import EngineCore
from replica.scheduling.request import Request
from tests import model_families as families
from tests.family_engines import Runners, Setting
from tests.model_families import FAMILIES, MORE_FAMILIES

BY_NAME = {family.name: family for family in (*FAMILIES, *MORE_FAMILIES)}
SHORT = ("llama", "gemma2")  # gemma2: a softcap after the output layer
TOP = 5
NEW_TOKENS = 8
PROMPTS = [
    tuple((7 * place + 3 * index) % 1800 for place in range(length))
    for index, length in enumerate((1, 5, 33, 70))
]
SETTINGS = (
    Setting("warm"),
    Setting("chunked-blocks-of-4", block_size=4, max_batched_tokens=23),
)
# Everything that moves a draw and none of what is told of it.
SAMPLING = SamplingParams(
    max_tokens=NEW_TOKENS,
    temperature=1.3,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.2,
    logit_bias=((5, 3.0), (9, -100.0)),
    ignore_eos=True,
    logprobs=TOP,
    prompt_logprobs=TOP,
)


@pytest.fixture(
    scope="module",
    params=[
        *SHORT,
        *(
            pytest.param(name, marks=(pytest.mark.long, pytest.mark.broad))
            for name in BY_NAME
            if name not in SHORT
        ),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(BY_NAME[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def runners(folder: Path) -> Iterator[Runners]:
    runners = Runners(folder, "cpu")
    yield runners
    runners.close()


def own_logprobs(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """What the model says of the token after each of these, (tokens, vocabulary)."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def check(found: Logprobs | None, tokens: Sequence[int], own: torch.Tensor) -> None:
    assert found is not None
    assert len(found) == len(tokens) == len(own)
    assert torch.tensor(found.chosen).tolist() == pytest.approx(
        own.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=2e-3
    )
    ids, values = torch.tensor(found.top_ids).view(-1, TOP), torch.tensor(found.top).view(-1, TOP)
    assert torch.allclose(values, own.topk(TOP).values, atol=2e-3)
    assert torch.allclose(own.gather(1, ids.long()), values, atol=2e-3)


def requests(sampling: SamplingParams) -> list[GenerateRequest]:
    return [
        GenerateRequest(RequestId(f"q{index}"), array("i", prompt), len(prompt), sampling, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]


def ask(engine: EngineCore, sampling: SamplingParams = SAMPLING) -> list[Completion]:
    return engine.complete(requests(sampling))


def check_answers(model: Any, answers: Sequence[Completion]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.cached_tokens == 0
        own = own_logprobs(model, [*prompt, *answer.token_ids])
        check(answer.logprobs, answer.token_ids, own[len(prompt) - 1 : -1])
        if len(prompt) > 1:
            check(answer.prompt_logprobs, prompt[1:], own[: len(prompt) - 1])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_they_are_those_of_the_models_own_forward(model: Any, runners: Runners, setting: Setting) -> None:
    """Twice, so that the second time every prompt is in the cache, and is computed all the same."""
    engine = runners.engine(setting)
    first, second = ask(engine), ask(engine)
    check_answers(model, first)
    check_answers(model, second)
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]


def test_what_was_thrown_out_tells_the_same(
    model: Any, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a prompt, after it, and in the middle of an answer: the newest, every third step."""
    engine = runners.engine(SETTINGS[1])
    plan, make_room, num_asked = engine._scheduler._step, engine._scheduler._step._make_room, 0

    def short_of_blocks(request: Request, num_tokens: int) -> bool:
        nonlocal num_asked
        num_asked += 1
        running = plan._running.requests
        is_newest = request is running[-1] is not running[0]
        if num_asked % 3 == 0 and is_newest and request.num_preemptions < 4:
            plan._preempt(request)
            return False
        return make_room(request, num_tokens)

    monkeypatch.setattr(plan, "_make_room", short_of_blocks)
    answers = ask(engine)
    assert sum(answer.num_preemptions > 1 for answer in answers) > 1
    check_answers(model, answers)
    monkeypatch.undo()
    assert [answer.token_ids for answer in ask(engine)] == [answer.token_ids for answer in answers]


APPEND_ONLY = Setting(
    "append-only-blocks-of-4", block_size=4, max_batched_tokens=23, cache_discipline="append_only"
)


@pytest.mark.parametrize("setting", [SETTINGS[1], APPEND_ONLY], ids=lambda setting: setting.name)
@pytest.mark.parametrize("num_drawn", [0, 1, 3])
def test_who_is_put_back_after_its_prompt_was_scored_finds_it_cached(
    model: Any, runners: Runners, setting: Setting, num_drawn: int
) -> None:
    """In the middle of its 70 tokens, where their log probabilities are still wanted, it finds nothing."""
    engine = runners.engine(setting)
    [request] = engine.take(requests(SAMPLING)[3])
    while request.num_output_tokens < num_drawn or not request.num_computed:
        engine.step()
    engine._scheduler._running.put_back(request)
    num_cached = (len(request.token_ids) - 1) // 4 * 4 if num_drawn else 0
    computed = engine.stats().computed_tokens
    while engine.has_work:
        engine.step()
    num_left = len(PROMPTS[3]) + NEW_TOKENS - 1 - num_cached
    assert engine.stats().computed_tokens - computed == num_left
    own = own_logprobs(model, request.token_ids)
    answer = Completion.of(request)
    check(answer.logprobs, answer.token_ids, own[len(PROMPTS[3]) - 1 : -1])
    check(answer.prompt_logprobs, PROMPTS[3][1:], own[: len(PROMPTS[3]) - 1])


def test_asking_changes_no_token(runners: Runners) -> None:
    """Nor does what else is in the batch: with a greedy screen, rows of both kinds are in one step."""
    plain = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    asking = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
    engine = runners.engine(Setting("screened", greedy_screen="on"))
    alone = [answer.token_ids for answer in ask(engine, plain)]
    both = engine.complete(
        GenerateRequest(
            RequestId(f"q{index}"), array("i", prompt), len(prompt), (plain, asking)[index % 2], seed=0
        )
        for index, prompt in enumerate(PROMPTS)
    )
    assert [answer.token_ids for answer in both] == alone
    assert [answer.logprobs is not None for answer in both] == [False, True, False, True]
    for answer in both[1::2]:
        assert answer.logprobs is not None
        assert answer.logprobs.top_ids.tolist() == list(answer.token_ids)


def test_a_continued_stream_tells_of_its_own_tokens_and_not_again_of_the_prompt(runners: Runners) -> None:
    engine = runners.engine(SETTINGS[0])
    whole = ask(engine)[2]
    so_far = array("i", PROMPTS[2] + whole.token_ids[:3])
    again = GenerateRequest(RequestId("a"), so_far, len(PROMPTS[2]), SAMPLING, seed=2, attempt=1)
    rest = engine.complete([again])[0]
    assert rest.token_ids == whole.token_ids
    assert rest.prompt_logprobs is None
    assert rest.logprobs is not None
    assert whole.logprobs is not None
    assert rest.logprobs.chosen.tolist() == pytest.approx(whole.logprobs.chosen[3:].tolist(), abs=2e-3)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_prompt_that_was_scored_before_is_looked_up_as_any_other(
    runners: Runners, setting: Setting
) -> None:
    """By an earlier attempt: of 33 tokens all but the last are in the cache, in blocks of 16 or 4."""
    engine = runners.engine(setting)
    whole = ask(engine)[2]
    so_far = array("i", PROMPTS[2] + whole.token_ids[:3])
    again = GenerateRequest(RequestId("a"), so_far, len(PROMPTS[2]), SAMPLING, seed=2, attempt=1)
    computed = engine.stats().computed_tokens
    rest = engine.complete([again])[0]
    assert (rest.cached_tokens, rest.token_ids) == (32, whole.token_ids)
    assert engine.stats().computed_tokens - computed == 1 + NEW_TOKENS - 1
    assert engine.report(epoch=1, number=1).queried_tokens == len(PROMPTS[2])
