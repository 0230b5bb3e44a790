"""A prompt that is computed for the cache alone: what of it is left, and what it is counted as."""

from __future__ import annotations

from dataclasses import replace

from cache.messages import FinishReason, GenerateRequest
from replica.engine.engine_core import EngineCore, Progress
from tests.fakes.engine import BLOCK_SIZE, make_request, sim_core

PREFIX = list(range(5 * BLOCK_SIZE))


def a_copy(name: str = "copy", **changes: object) -> GenerateRequest:
    return replace(make_request(name, PREFIX, max_tokens=1), for_cache=True, **changes)  # type: ignore[arg-type]


def a_core(**settings: object) -> EngineCore:
    return sim_core(64, max_model_len=200, **settings)  # type: ignore[arg-type]


def last(core: EngineCore) -> list[Progress]:
    ended = []
    while core.has_work:
        ended += [progress for progress in core.step() if progress.is_last]
    return ended


def test_it_ends_with_its_prompt_without_a_token_and_holds_nothing() -> None:
    core = a_core(max_batched_tokens=8)
    core.submit(a_copy())
    [progress] = last(core)
    assert progress.error is None
    assert progress.token_id is None
    assert progress.request.finish_reason is FinishReason.LENGTH
    assert core.pins.held() == ()
    assert core.load().free_blocks == 64
    assert core.complete([make_request("r", [*PREFIX, 1])])[0].cached_tokens == len(PREFIX)


def test_its_prompt_is_counted_and_nothing_of_an_answer() -> None:
    """Prompt tokens were computed; no client got a token, or waited for one."""
    core = a_core()
    core.submit(a_copy())
    last(core)
    report = core.report(epoch=1, number=1)
    assert report.prompt_tokens == len(PREFIX)
    assert core.stats().output_tokens == 0
    for of_requests in ("first_token_s", "request_s", "queue_s", "decode_s", "output_length", "max_tokens"):
        assert sum(getattr(report, of_requests).counts) == 0, of_requests
    assert report.length_limited == 0


def test_how_long_answers_are_is_not_learnt_from_it() -> None:
    """The answers that were seen would be forgotten for it."""
    core = a_core()
    core.complete([make_request("r", [*PREFIX, 1], max_tokens=10, ignore_eos=True)])
    core.submit(a_copy())
    last(core)
    assert core._scheduler._admission._answers.num_seen == 1
