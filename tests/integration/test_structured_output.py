"""Output that has to have a structure has it, however it is computed, and nobody beside it is touched."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from cache.block_hash import BlockHasher
from cache.errors import StructureRefused
from cache.messages import FinishReason, GenerateRequest, SamplingParams
from cache.structure import Structure, StructureKind
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.completion import Completion
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from replica.scheduling.answer_lengths import AnswerLengths
from replica.structures.compiler import StructureCompiler, Structures, compile_structure
from replica.structures.matcher import StructureMatcher
from replica.structures.vocabulary import StructureVocabulary
from router.openai_api.call_grammar import CallRules, calls_of
from router.openai_api.pieces import Piece
from router.openai_api.tool_calls import HermesReader
from tests import model_families as families
from tests.fakes.engine import VirtualClock, fingerprint, make_request, sim_config
from tests.fakes.structures import END, regex, schema, tagged_tokenizer, tiny_tokenizer, tiny_vocabulary
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
# Its first token is followed by more alternatives than the limits allow.
TOO_WIDE = schema(
    {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}}
)


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


class _Decoder:
    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = tiny_tokenizer().decode(list(token_ids), skip_special_tokens=True)  # type: ignore[attr-defined]
        return text


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
    decoder = _Decoder()
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


# -- what ends an answer: over the simulated runner, whose tokens are any -------------------------------


def _sim(vocabulary: StructureVocabulary | None = None, **settings: Any) -> EngineCore:
    clock = VirtualClock()
    vocabulary = vocabulary or tiny_vocabulary()
    config = sim_config(256, sim=SimConfig(vocab_size=vocabulary.vocab_size), **settings)
    runner = SimRunner(
        config.sim, block_size=config.block_size, sleep=clock.sleep, eos_token_ids=frozenset({0, END})
    )
    return EngineCore(
        runner,
        config,
        BlockHasher(fingerprint(config.block_size)),
        decoder=_Decoder(),
        structures=StructureCompiler(vocabulary),
        clock=clock,
    )


def _ask(structure: Structure, seed: int = 0, **sampling: Any) -> GenerateRequest:
    sampling = {"max_tokens": 64, "temperature": 1.0, **sampling}
    return replace(make_request(f"r{seed}", range(9), seed=seed, **sampling), structure=structure)


def test_an_answer_that_can_go_no_further_is_complete() -> None:
    for seed in range(10):
        said = _sim().complete([_ask(regex("(yes|no)!"), seed, ignore_eos=True, min_tokens=60)])[0]
        assert said.text in ("yes!", "no!")
        assert said.finish_reason is FinishReason.STOP


def test_what_structures_cost_is_told() -> None:
    engine = _sim()
    engine.complete([make_request("free", range(9), max_tokens=8)])
    before = engine.report(epoch=1, number=1)
    assert (before.compiled_structures, sum(before.mask_s.counts), sum(before.compile_s.counts)) == (0, 0, 0)
    said = engine.complete([_ask(WORDS, 1), _ask(WORDS, 2)])
    with pytest.raises(StructureRefused):
        engine.take(_ask(regex("(")))
    told = engine.report(epoch=1, number=2)
    assert (told.compiled_structures, told.refused_structures) == (2, 1)  # one that both asked for
    assert sum(told.compile_s.counts) == 2
    # A mask for every token, those of one step together.
    assert sum(told.mask_s.counts) == max(len(each.token_ids) for each in said)
    assert told.mask_s.total > 0
    assert told.compile_s.total > 0


def test_an_answer_complete_with_its_very_last_token_was_not_cut_off() -> None:
    said = _sim().complete([_ask(regex("yes"), max_tokens=64)])[0]
    exact = _sim().complete([_ask(regex("yes"), max_tokens=len(said.token_ids))])[0]
    assert (exact.text, exact.finish_reason) == ("yes", FinishReason.STOP)


def test_an_end_may_come_where_the_structure_may_end_whatever_ignore_eos_says() -> None:
    lengths = set()
    for seed in range(30):
        said = _sim().complete([_ask(regex("(ab)*"), seed, ignore_eos=True)])[0]
        assert re.fullmatch("(ab)*", said.text)
        lengths.add((said.finish_reason, len(said.text)))
    assert (FinishReason.STOP, 0) in lengths
    assert len(lengths) > 2


def test_min_tokens_hold_the_end_back_where_there_is_another_way() -> None:
    for seed in range(20):
        said = _sim().complete([_ask(regex("[abc]{0,12}"), seed, min_tokens=5)])[0]
        assert len(said.token_ids) >= 5 or len(said.text) == 12


def test_stop_strings_and_ids_cut_an_answer_wherever_it_is() -> None:
    letters = _sim().complete([_ask(regex("(x[abc])+"), 1, stop=("b",), max_tokens=200, min_tokens=1)])[0]
    assert "b" not in letters.text
    [c] = tiny_tokenizer().encode("c")  # type: ignore[attr-defined]
    by_id = _sim().complete([_ask(regex("(x[abc])+"), 2, stop_token_ids=(c,), max_tokens=200)])[0]
    assert c not in by_id.token_ids[:-1]


def test_an_answer_cut_off_is_told_so() -> None:
    said = _sim().complete([_ask(regex("a{500}"), max_tokens=7)])[0]
    assert said.finish_reason is FinishReason.LENGTH
    assert set(said.text) == {"a"}


def test_a_mask_that_becomes_too_complex_fails_its_request_alone() -> None:
    core = _sim()
    errors, ended = {}, {}
    for request in (
        _ask(TOO_WIDE, 1),
        _ask(regex("[a-z]{9}"), 2),
        make_request("r3", range(9), max_tokens=5),
    ):
        core.submit(request)
    while core.has_work:
        for progress in core.step():
            if progress.error is not None:
                errors[progress.request.request_id] = progress.error
            elif progress.is_last:
                ended[progress.request.request_id] = progress.request.finish_reason
    assert isinstance(errors.pop(RequestId("r1")), StructureRefused)
    assert not errors
    assert ended == {"r2": FinishReason.STOP, "r3": FinishReason.LENGTH}
    assert core.stats().num_failed_steps == 0
    assert core.stats().cache.used == 0


def test_each_of_several_answers_has_a_place_of_its_own() -> None:
    several = replace(_ask(regex("[abc]{3,9}"), min_tokens=4), n=5)
    texts = [said.text for said in _sim().complete([several])]
    assert len(texts) == 5
    assert all(re.fullmatch("[abc]{3,9}", text) for text in texts)
    assert len(set(texts)) > 1


def test_the_structure_is_no_part_of_what_is_cached() -> None:
    core = _sim(max_batched_tokens=512)
    prompt = range(64)
    core.complete([replace(make_request("a", prompt, max_tokens=2), structure=regex("yes"))])
    for structure in (None, regex("no"), Structure(StructureKind.GRAMMAR, 'start: "maybe"')):
        said = core.complete([replace(make_request("b", prompt, max_tokens=2), structure=structure)])[0]
        assert said.cached_tokens == 60


# -- beside the engine's thread -------------------------------------------------------------------------


class _Gate:
    """Compiles when it is let through."""

    def __init__(self) -> None:
        self.is_compiling = threading.Event()
        self.opened = threading.Event()

    def __call__(self, vocabulary: StructureVocabulary, structure: Structure) -> StructureMatcher:
        self.is_compiling.set()
        assert self.opened.wait(30)
        return compile_structure(vocabulary, structure)


@asynccontextmanager
async def _running(gate: _Gate) -> AsyncIterator[Engine]:
    config = sim_config(256, sim=SimConfig(base_s=0.0005, vocab_size=tiny_vocabulary().vocab_size))
    structures = StructureCompiler(tiny_vocabulary(), build=gate)
    core = EngineCore(
        SimRunner(config.sim, block_size=config.block_size, eos_token_ids=frozenset({0, END})),
        config,
        BlockHasher(fingerprint(config.block_size)),
        decoder=_Decoder(),
        structures=structures,
    )
    try:
        async with Engine(core, config) as engine:
            yield engine
    finally:
        gate.opened.set()
        structures.close()


async def _say(engine: Engine, request: GenerateRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


async def test_steps_wait_for_nobodys_compilation() -> None:
    gate = _Gate()
    async with _running(gate) as engine:
        waiting = asyncio.create_task(_say(engine, _ask(regex("yes"))))
        await asyncio.to_thread(gate.is_compiling.wait, 30)
        for seed in range(5):
            await _say(engine, make_request(f"free{seed}", range(9), max_tokens=20, seed=seed))
        assert not waiting.done()
        gate.opened.set()
        assert await waiting == "yes"


async def test_who_leaves_while_it_is_compiled_leaves_nothing() -> None:
    gate = _Gate()
    async with _running(gate) as engine:
        waiting = asyncio.create_task(_say(engine, _ask(regex("yes"))))
        await asyncio.to_thread(gate.is_compiling.wait, 30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.opened.set()
        assert await _say(engine, _ask(regex("yes"))) == "yes"  # of the same name
        assert engine.load().num_running == engine.load().num_waiting == 0


async def test_a_refusal_reaches_whoever_asked() -> None:
    gate = _Gate()
    gate.opened.set()
    async with _running(gate) as engine:
        with pytest.raises(StructureRefused):
            await _say(engine, _ask(schema({"type": "array", "uniqueItems": True})))
        with pytest.raises(StructureRefused):
            await _say(engine, _ask(TOO_WIDE))
        assert await _say(engine, _ask(regex("yes"))) == "yes"
