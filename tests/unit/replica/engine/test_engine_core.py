"""The engine without its thread: whole generations, continuations, refusals, counters."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from cache.block_hash import BlockHasher
from cache.messages import Delta, GenerateRequest
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.errors import AdmissionFailed, ForwardFailed, InvalidRequest, QueueFull, RankLost
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import ScheduledSequence, StepResult
from tests.fakes.engine import (
    BLOCK_SIZE,
    TokenizersDecoder,
    VirtualClock,
    fingerprint,
    make_request,
    sim_config,
    sim_core,
)

DECODER = TokenizersDecoder()
SIM = SimConfig(vocab_size=DECODER.tokenizer.get_vocab_size())


def stream(core: EngineCore, request: GenerateRequest, every: int = 1) -> list[Delta]:
    """One request's deltas, text taken every so many tokens."""
    taken = core.submit(request)
    deltas: list[Delta] = []
    tokens: list[int] = []
    while taken.finish_reason is None or not deltas or deltas[-1].finish_reason is None:
        tokens += [p.token_id for p in core.step() if p.token_id is not None]
        if len(tokens) >= every or taken.finish_reason:
            deltas.append(Delta(taken.detokenizer.take(), tuple(tokens), 0, taken.finish_reason))
            tokens = []
    return deltas


@pytest.mark.parametrize("stop", [(), ("e",), ("er", "a t")])
def test_continuation_equals_the_uninterrupted_text_at_every_cut(stop: tuple[str, ...]) -> None:
    """Another replica, a cold cache: what was sent and what it sends are one and the same text."""
    prompt = DECODER.encode("Here is a table of people.")
    request = make_request("r", prompt, max_tokens=30, temperature=1.0, seed=5, stop=stop, min_tokens=3)
    deltas = stream(sim_core(decoder=DECODER, sim=SIM), request)
    text = "".join(d.text for d in deltas)
    tokens = [t for d in deltas for t in d.token_ids]
    for cut in range(len(deltas) + 1):
        done = [t for d in deltas[:cut] for t in d.token_ids]
        sent = sum(len(d.text) for d in deltas[:cut])
        attempt = replace(request, token_ids=array("i", [*prompt, *done]), sent_chars=sent, attempt=1)
        rest = stream(sim_core(decoder=DECODER, sim=SIM, max_batched_tokens=7), attempt)
        assert "".join(d.text for d in rest) == text[sent:]
        assert done + [t for d in rest for t in d.token_ids] == tokens
        assert rest[-1].finish_reason == deltas[-1].finish_reason


def test_the_text_goes_on_from_the_prompts_in_every_attempt() -> None:
    """With a decoder that drops the first token's space, as those of Llama 2 and Mistral do."""

    class Pieces:
        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(f" {token_id}" for token_id in token_ids)[1:]

    prompt = [3, 1, 4]
    request = make_request("r", prompt, max_tokens=5)
    deltas = stream(sim_core(decoder=Pieces()), request)
    tokens = [t for d in deltas for t in d.token_ids]
    text = "".join(d.text for d in deltas)
    assert Pieces().decode(prompt) + text == Pieces().decode([*prompt, *tokens])
    sent = len(deltas[0].text)
    attempt = replace(request, token_ids=array("i", [*prompt, tokens[0]]), sent_chars=sent, attempt=1)
    assert "".join(d.text for d in stream(sim_core(decoder=Pieces()), attempt)) == text[sent:]


def test_special_tokens_are_spelled_where_a_request_asks_for_them() -> None:
    """Its stop strings are looked for in that text; tokens and the reason to end are the same without one."""

    class Letters:
        def __init__(self, special: str) -> None:
            self._special = special

        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(self._special if token_id % 2 else "a" for token_id in token_ids)

    core = partial(sim_core, decoder=Letters(""), spelling_decoder=Letters("<s>"))
    requests = [
        make_request("r", [3, 1, 4], max_tokens=20, temperature=1.0, skip_special_tokens=skips, stop=stop)
        for skips, stop in ((True, ()), (False, ()), (True, ("<s>",)), (False, ("<s>",)))
    ]
    answers = [stream(core(), request) for request in requests]
    skipped, spelled, uncut, cut = ("".join(d.text for d in deltas) for deltas in answers)
    tokens = [[t for d in deltas for t in d.token_ids] for deltas in answers]
    assert spelled == Letters("<s>").decode(tokens[0]) != Letters("").decode(tokens[0]) == skipped == uncut
    assert tokens[0] == tokens[1] == tokens[2]
    assert cut == spelled.split("<s>")[0]
    attempt = replace(requests[1], token_ids=array("i", [3, 1, 4, *tokens[1][:5]]), sent_chars=4, attempt=1)
    assert "".join(d.text for d in stream(core(), attempt)) == spelled[4:]


def test_who_has_waited_at_its_router_goes_before_who_came_there_later() -> None:
    core = sim_core(max_running=1)
    requests = [make_request(name, range(number, 20 + number)) for number, name in enumerate("abc")]
    for request, waited_s in zip(requests, (0.0, 1.0, 2.0), strict=True):
        core.submit(replace(request, waited_s=waited_s))
    began: list[str] = []
    while len(began) < 3:
        began += [p.request.request_id for p in core.step() if p.request.request_id not in began]
    assert began == ["c", "b", "a"]


def test_same_output_whatever_the_chunks_and_the_cache() -> None:
    prompt = list(range(50))
    request = make_request("r", prompt, max_tokens=20, temperature=1.0, seed=9)
    outputs = {
        sim_core(prefix_caching=caching, max_batched_tokens=budget).complete([request])[0].token_ids
        for caching in (True, False)
        for budget in (1, 7, 512)
    }
    assert len(outputs) == 1


def test_warm_prompt_reports_its_cached_tokens_and_the_same_output() -> None:
    core = sim_core()
    request = make_request("r", range(21), max_tokens=6)
    cold, warm = core.complete([request])[0], core.complete([request])[0]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 20)
    assert cold.token_ids == warm.token_ids


def test_caching_switched_off_reports_none() -> None:
    core = sim_core(prefix_caching=False)
    request = make_request("r", range(21), max_tokens=6)
    assert [core.complete([request])[0].cached_tokens for _ in range(2)] == [0, 0]
    assert core.stats().cache.cached == 0


def test_another_salt_does_not_hit() -> None:
    core = sim_core()
    for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 20), ("", 20)):
        request = make_request("r", range(21), salt=salt)
        assert core.complete([request])[0].cached_tokens == cached


def test_cached_tokens_count_the_prompt_only() -> None:
    """A continued stream also hits the earlier attempt's output, which is no prompt."""
    core = sim_core()
    whole = core.complete([make_request("r", range(10), max_tokens=12)])[0].token_ids
    attempt = make_request("r", range(10), output=whole[:9], max_tokens=12)
    completion = core.complete([attempt])[0]
    assert completion.cached_tokens == 10
    assert completion.token_ids == whole


def test_a_request_that_cannot_be_taken_in_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong with it: it ended the engine's thread, and with it everybody else's request."""
    core = sim_core()
    spoilt = make_request("spoilt", range(9), max_tokens=4)
    object.__delattr__(spoilt.sampling, "min_p")
    with caplog.at_level(logging.ERROR), pytest.raises(AdmissionFailed, match="AttributeError"):
        core.submit(spoilt)
    (record,) = caplog.records
    assert record.__dict__["request_id"] == "spoilt"
    assert not core.has_work
    assert core.stats().cache.used == 0
    same = make_request("spoilt", range(9), max_tokens=4)
    assert len(core.complete([same])[0].token_ids) == 4


def test_sampling_depends_on_the_seed_and_greedy_does_not() -> None:
    def output(seed: int, temperature: float) -> tuple[int, ...]:
        request = make_request("r", range(9), max_tokens=8, seed=seed, temperature=temperature)
        return sim_core().complete([request])[0].token_ids

    assert output(1, 1.0) == output(1, 1.0) != output(2, 1.0)
    assert output(1, 0.0) == output(2, 0.0)


def test_end_of_sequence_ends_a_request_unless_told_otherwise() -> None:
    request = make_request("r", range(9), max_tokens=12)
    free = sim_core().complete([request])[0].token_ids
    eos = frozenset({free[4]})
    first = free.index(free[4]) + 1
    ended = sim_core(eos_token_ids=eos).complete([request])[0]
    assert (ended.token_ids, ended.finish_reason) == (free[:first], "stop")
    ignoring = make_request("r", range(9), max_tokens=12, ignore_eos=True)
    assert sim_core(eos_token_ids=eos).complete([ignoring])[0].token_ids == free
    patient = make_request("r", range(9), max_tokens=12, min_tokens=first + 1)
    assert len(sim_core(eos_token_ids=eos).complete([patient])[0].token_ids) > first


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("token_ids", make_request("r", [])),
        ("token_ids", make_request("r", [1000])),
        ("token_ids", make_request("r", [-1])),
        ("num_prompt_tokens", replace(make_request("r", [1]), num_prompt_tokens=2)),
        ("num_prompt_tokens", replace(make_request("r", [1]), num_prompt_tokens=0)),
        ("adapter", replace(make_request("r", [1]), adapter="french")),
        ("max_tokens", make_request("r", [1], max_tokens=0)),
        ("min_tokens", make_request("r", [1], max_tokens=2, min_tokens=3)),
        ("temperature", make_request("r", [1], temperature=float("nan"))),
        ("temperature", make_request("r", [1], temperature=-0.1)),
        ("top_p", make_request("r", [1], top_p=0.0)),
        ("top_k", make_request("r", [1], top_k=-1)),
        ("stop", make_request("r", [1], stop=("",))),
        ("sent_chars", make_request("r", [1], sent_chars=-1)),
    ],
)
def test_what_would_break_a_step_is_refused(field: str, request_: GenerateRequest) -> None:
    """One bad request must not fail the step of its neighbours."""
    core = sim_core()
    with pytest.raises(InvalidRequest) as caught:
        core.submit(request_)
    assert caught.value.field == field
    assert not core.has_work


def test_complete_raises_and_leaves_nothing_behind() -> None:
    core = sim_core(sim=SimConfig(raise_every_steps=2))
    with pytest.raises(ForwardFailed):
        core.complete([make_request("a", range(9)), make_request("b", range(9))])
    assert not core.has_work
    assert core.stats().cache.used == 0
    core = sim_core(max_waiting=1)
    with pytest.raises(QueueFull):
        core.complete([make_request("a", [1]), make_request("b", [2])])
    assert not core.has_work


def test_repeated_cause_is_logged_in_full_once(caplog: pytest.LogCaptureFixture) -> None:
    """A forward that fails with every step must not bury the log under one traceback."""

    class Broken(SimRunner):
        def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
            raise RuntimeError("device lost")

    core = sim_core(runner=Broken(sim_config().sim, block_size=BLOCK_SIZE))
    with caplog.at_level(logging.ERROR):
        for i in range(3):
            with pytest.raises(ForwardFailed):
                core.complete([make_request(f"r{i}", [1])])
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert core.stats().num_failed_steps == 3


def test_a_runner_that_breaks_its_promise_fails_the_step_only() -> None:
    class Forgetful(SimRunner):
        def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
            return StepResult((None,) * len(sequences), 0.001)

    core = sim_core(runner=Forgetful(sim_config().sim, block_size=BLOCK_SIZE))
    with pytest.raises(ForwardFailed):
        core.complete([make_request("r", range(9))])
    assert core.stats().cache.free == 64


def test_a_runner_that_can_go_on_no_more_ends_the_engine() -> None:
    """Not the step's requests alone: the next ones would find the same."""

    class Bereft(SimRunner):
        def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
            raise RankLost(1, -9)

    core = sim_core(runner=Bereft(sim_config().sim, block_size=BLOCK_SIZE))
    core.submit(make_request("r", range(9)))
    with pytest.raises(RankLost):
        core.step()


def test_hashes_sent_by_the_router_are_used_only_if_they_are_ours() -> None:
    hasher = BlockHasher(fingerprint())
    request = make_request("r", range(21))
    right = tuple(hasher.chain(hasher.root(), request.token_ids))
    wrong = tuple(hasher.chain(hasher.root(salt="x"), request.token_ids))
    core = sim_core()
    core.complete([request])
    for hashes in (right, wrong):
        assert core.complete([replace(request, block_hashes=hashes)])[0].cached_tokens == 20


def test_load_carries_the_step_time_once_it_is_known() -> None:
    clock = VirtualClock()
    core = sim_core(clock=clock, sim=SimConfig(base_s=0.01, per_token_s=0.001))
    assert core.load().step_time is None
    for i in range(12):
        core.complete([make_request("r", range(i, 40 + i), max_tokens=5)])
    model = core.load().step_time
    assert model is not None
    assert model.prefill_s(100, 0, 512) == pytest.approx(0.11, rel=0.05)
