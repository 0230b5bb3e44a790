"""What ends an answer that has a structure, and what it costs: any tokens, by the simulated runner."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from cache.block_hash import BlockHasher
from cache.errors import StructureRefused
from cache.messages import FinishReason
from cache.structure import Structure, StructureKind
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from replica.structures.compiler import StructureCompiler
from replica.structures.vocabulary import StructureVocabulary
from tests.fakes.engine import VirtualClock, fingerprint, make_request, sim_config
from tests.fakes.structures import (
    END,
    TOO_WIDE,
    TinyDecoder,
    asked,
    regex,
    tiny_tokenizer,
    tiny_vocabulary,
)


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
        decoder=TinyDecoder(),
        structures=StructureCompiler(vocabulary),
        clock=clock,
    )


def test_an_answer_that_can_go_no_further_is_complete() -> None:
    for seed in range(10):
        said = _sim().complete([asked(regex("(yes|no)!"), seed, ignore_eos=True, min_tokens=60)])[0]
        assert said.text in ("yes!", "no!")
        assert said.finish_reason is FinishReason.STOP


def test_what_structures_cost_is_told() -> None:
    engine = _sim()
    engine.complete([make_request("free", range(9), max_tokens=8)])
    before = engine.report(epoch=1, number=1)
    assert (before.compiled_structures, sum(before.mask_s.counts), sum(before.compile_s.counts)) == (0, 0, 0)
    said = engine.complete([asked(regex("[a-z ]{1,40}"), 1), asked(regex("[a-z ]{1,40}"), 2)])
    with pytest.raises(StructureRefused):
        engine.take(asked(regex("(")))
    told = engine.report(epoch=1, number=2)
    assert (told.compiled_structures, told.refused_structures) == (2, 1)  # one that both asked for
    assert sum(told.compile_s.counts) == 2
    # A mask for every token, those of one step together.
    assert sum(told.mask_s.counts) == max(len(each.token_ids) for each in said)
    assert told.mask_s.total > 0
    assert told.compile_s.total > 0


def test_an_answer_complete_with_its_very_last_token_was_not_cut_off() -> None:
    said = _sim().complete([asked(regex("yes"), max_tokens=64)])[0]
    exact = _sim().complete([asked(regex("yes"), max_tokens=len(said.token_ids))])[0]
    assert (exact.text, exact.finish_reason) == ("yes", FinishReason.STOP)


def test_an_end_may_come_where_the_structure_may_end_whatever_ignore_eos_says() -> None:
    lengths = set()
    for seed in range(30):
        said = _sim().complete([asked(regex("(ab)*"), seed, ignore_eos=True)])[0]
        assert re.fullmatch("(ab)*", said.text)
        lengths.add((said.finish_reason, len(said.text)))
    assert (FinishReason.STOP, 0) in lengths
    assert len(lengths) > 2


def test_min_tokens_hold_the_end_back_where_there_is_another_way() -> None:
    for seed in range(20):
        said = _sim().complete([asked(regex("[abc]{0,12}"), seed, min_tokens=5)])[0]
        assert len(said.token_ids) >= 5 or len(said.text) == 12


def test_stop_strings_and_ids_cut_an_answer_wherever_it_is() -> None:
    letters = _sim().complete([asked(regex("(x[abc])+"), 1, stop=("b",), max_tokens=200, min_tokens=1)])[0]
    assert "b" not in letters.text
    [c] = tiny_tokenizer().encode("c")  # type: ignore[attr-defined]
    by_id = _sim().complete([asked(regex("(x[abc])+"), 2, stop_token_ids=(c,), max_tokens=200)])[0]
    assert c not in by_id.token_ids[:-1]


def test_an_answer_cut_off_is_told_so() -> None:
    said = _sim().complete([asked(regex("a{500}"), max_tokens=7)])[0]
    assert said.finish_reason is FinishReason.LENGTH
    assert set(said.text) == {"a"}


def test_a_mask_that_becomes_too_complex_fails_its_request_alone() -> None:
    core = _sim()
    errors, ended = {}, {}
    for request in (
        asked(TOO_WIDE, 1),
        asked(regex("[a-z]{9}"), 2),
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
    several = replace(asked(regex("[abc]{3,9}"), min_tokens=4), n=5)
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
