"""Output that has to have a structure has it, however it is computed, and nobody beside it is touched."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from cache.errors import StructureRefused
from cache.messages import FinishReason, GenerateRequest, SamplingParams
from cache.structure import Structure
from cache.types import RequestId
from replica.engine.completion import Completion
from replica.engine.engine_core import EngineCore
from replica.scheduling.answer_lengths import AnswerLengths
from replica.structures.compiler import StructureCompiler, Structures
from replica.structures.vocabulary import StructureVocabulary
from router.openai_api.call_grammar import CallRules, calls_of
from router.openai_api.pieces import Piece
from router.openai_api.tool_calls import HermesReader
from tests import model_families as families
from tests.fakes.structures import (
    END,
    TinyDecoder,
    regex,
    schema,
    tagged_tokenizer,
    tiny_tokenizer,
)
from tests.fakes.tokenizers import TAG_TOKENS
from tests.family_engines import SETTINGS, Runners, Setting
from tests.model_families import FAMILIES, VOCABULARY

PROMPTS = families.prompts()[:8]
MAX_TOKENS = 24
RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["a", "bc"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
WORDS = regex("[a-z ]{1,40}")
# Every other prompt is free.
STRUCTURES: list[Structure | None] = [
    schema(RECORD),
    None,
    WORDS,
    None,
    regex("(yes|no){4}"),
    None,
    schema({}),
    None,
]
WARM = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
COLD = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
ALONE = Setting("alone", prefix_caching=False)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    family = next(family for family in FAMILIES if family.name == "llama")
    runners = Runners(families.save(family, tmp_path_factory.mktemp("llama")), "cpu")
    yield runners
    runners.close()


@pytest.fixture(scope="module")
def structures() -> Iterator[Structures]:
    """Over more logits than tokens, and a model that names no end."""
    vocabulary = StructureVocabulary(tiny_tokenizer(), vocab_size=VOCABULARY, eos_token_ids=frozenset())
    compiler = StructureCompiler(vocabulary)
    yield compiler
    compiler.close()


def _engine(runners: Runners, structures: Structures, setting: Setting) -> EngineCore:
    return runners.engine(setting, structures)


def _requests(
    sampling: SamplingParams, structures: Sequence[Structure | None] = STRUCTURES
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            RequestId(f"q{index}"), array("i", prompt), len(prompt), sampling, 50 + index, structure=structure
        )
        for index, (prompt, structure) in enumerate(zip(PROMPTS, structures, strict=True))
    ]


def _tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


# What a structure allows next goes by request and position, whatever a setting cuts, finds, takes away,
# copies back or screens. What greedy rows have of their own is the screen, and being put back. The rest is in
# the broad suite.
MEETS = {
    "sampled": ("cache-on", "chunked-blocks-of-4", "preempted-blocks-of-4", "swapped", "screened"),
    "greedy": ("preempted-blocks-of-4", "screened"),
}
DRAWN = [
    pytest.param(
        sampling,
        setting,
        id=f"{name}-{setting.name}",
        marks=() if setting.name in MEETS[name] else (pytest.mark.long, pytest.mark.broad),
    )
    for name, sampling in (("sampled", WARM), ("greedy", COLD))
    for setting in SETTINGS
]


@pytest.fixture(scope="module")
def said_alone(
    request: pytest.FixtureRequest, runners: Runners, structures: Structures
) -> tuple[SamplingParams, list[tuple[int, ...]]]:
    """A way to draw, and what each request says by it in an engine of its own."""
    asked = [
        _engine(runners, structures, ALONE).complete([request])[0].token_ids
        for request in _requests(request.param)
    ]
    return request.param, asked


@pytest.mark.parametrize(("said_alone", "setting"), DRAWN, indirect=["said_alone"])
def test_nothing_but_the_structure_changes_what_is_said(
    runners: Runners,
    structures: Structures,
    setting: Setting,
    said_alone: tuple[SamplingParams, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batch, chunks, cache, preemption and the screen: each says what it says alone."""
    sampling, alone = said_alone
    engine = _engine(runners, structures, setting)
    if not setting.is_roomy:  # let them in together, to be thrown out again
        monkeypatch.setattr(AnswerLengths, "expected", lambda _self, so_far, _at_most: so_far)
    for _ in range(2):  # cold, then warm
        assert _tokens(engine.complete(_requests(sampling))) == alone
    if setting.preempts:
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("sampling", [WARM, COLD], ids=["sampled", "greedy"])
def test_who_is_free_beside_the_others_says_what_they_would_among_themselves(
    runners: Runners, structures: Structures, sampling: SamplingParams
) -> None:
    mixed = _tokens(_engine(runners, structures, ALONE).complete(_requests(sampling)))
    free = _tokens(_engine(runners, structures, ALONE).complete(_requests(sampling, [None] * len(PROMPTS))))
    for index, structure in enumerate(STRUCTURES):
        assert (mixed[index] == free[index]) is (structure is None)


def test_what_is_said_has_the_structure(runners: Runners, structures: Structures) -> None:
    sampling = replace(WARM, max_tokens=120)
    decoder = TinyDecoder()
    said = _engine(runners, structures, SETTINGS[0]).complete(_requests(sampling))
    ended = [completion for completion in said if completion.finish_reason is FinishReason.STOP]
    assert len(ended) >= 2
    record, yes = decoder.decode(said[0].token_ids), decoder.decode(said[4].token_ids)
    jsonschema.validate(json.loads(record), RECORD)
    assert re.fullmatch("(yes|no){4}", yes)
    assert re.fullmatch("[a-z ]{1,40}", decoder.decode(said[2].token_ids))


def _continued(request: GenerateRequest, so_far: Sequence[int]) -> GenerateRequest:
    """As the Router sends it to another replica, with the tokens that the one that was lost has produced."""
    return replace(request, token_ids=request.token_ids + array("i", so_far), attempt=request.attempt + 1)


@pytest.mark.parametrize("index", [0, 2, 6])
def test_a_continued_answer_goes_on_in_its_structure(
    runners: Runners, structures: Structures, index: int
) -> None:
    """The router sends prompt and tokens so far to another replica."""
    request = _requests(WARM)[index]
    whole = _engine(runners, structures, ALONE).complete([request])[0]
    for so_far in range(1, len(whole.token_ids), 4):
        again = _continued(request, whole.token_ids[:so_far])
        said = _engine(runners, structures, SETTINGS[0]).complete([again])[0]
        assert (said.token_ids, said.finish_reason) == (whole.token_ids, whole.finish_reason)


def test_an_answer_that_was_complete_when_its_replica_was_lost_ends_at_once(
    runners: Runners, structures: Structures
) -> None:
    request = _requests(WARM)[4]
    whole = _engine(runners, structures, ALONE).complete([request])[0]
    assert whole.finish_reason is FinishReason.STOP
    again = _continued(request, whole.token_ids)
    engine = _engine(runners, structures, ALONE)
    said = engine.complete([again])[0]
    assert (said.token_ids, said.finish_reason) == (whole.token_ids, FinishReason.STOP)
    assert engine.stats().num_steps == 0


def test_tokens_that_left_the_structure_before_are_refused(runners: Runners, structures: Structures) -> None:
    request = _requests(WARM)[0]
    engine = _engine(runners, structures, ALONE)
    with pytest.raises(StructureRefused):
        engine.submit(_continued(request, [5, 6, 7]))
    assert not engine.has_work
    assert engine.stats().cache.used == 0


def _say_calls(runners: Runners, tags: str, *, is_required: bool, begin: Sequence[int] = ()) -> list[Piece]:
    """What is read of those answers that come to their end. begin: tokens that the model likes to say."""
    tokenizer: Any = tagged_tokenizer(tags)
    vocabulary = StructureVocabulary(tokenizer, vocab_size=VOCABULARY, eos_token_ids=frozenset({0, END}))
    compiler = StructureCompiler(vocabulary)
    structure = calls_of([("find", schema(RECORD))], CallRules(is_required, is_single=True))
    sampling = replace(WARM, max_tokens=160, logit_bias=tuple((token_id, 100.0) for token_id in begin))
    requests = _requests(sampling, [structure] * len(PROMPTS))
    said = _engine(runners, compiler, SETTINGS[0]).complete(requests)
    compiler.close()
    texts = [
        tokenizer.decode(list(each.token_ids), skip_special_tokens=True)
        for each in said
        if each.finish_reason is FinishReason.STOP
    ]
    assert len(texts) >= 4
    return [HermesReader().read(text, FinishReason.STOP) for text in texts]


@pytest.mark.parametrize("tags", TAG_TOKENS)
def test_calls_are_forced_however_the_tokenizer_has_their_tags(runners: Runners, tags: str) -> None:
    for piece in _say_calls(runners, tags, is_required=True):
        assert [call.name for call in piece.calls] == ["find"]
        jsonschema.validate(json.loads(piece.calls[0].arguments), RECORD)
        assert not piece.text


def test_a_model_may_begin_a_call_by_the_tags_own_token(runners: Runners) -> None:
    """Where a strict function holds what follows: its token was masked, so that no call came."""
    tag = tagged_tokenizer("plain").convert_tokens_to_ids("<tool_call>")  # type: ignore[attr-defined]
    for piece in _say_calls(runners, "plain", is_required=False, begin=[tag]):
        assert [call.name for call in piece.calls] == ["find"]
        jsonschema.validate(json.loads(piece.calls[0].arguments), RECORD)
