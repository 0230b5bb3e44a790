"""What an engine counts for metrics: every prompt once, every token, every end, and times that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.engine_report import EngineReport
from cache.messages import GenerateRequest
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, make_pin, make_request, sim_core

SIM = SimConfig(base_s=0.1, per_token_s=0.01, per_attention_s=0.0, per_sequence_s=0.0)


def report(core: EngineCore) -> EngineReport:
    return core.report(epoch=1, number=1)


def count(core: EngineCore, name: str) -> int:
    return sum(getattr(report(core), name).counts)


def run(core: EngineCore, *requests: GenerateRequest) -> None:
    core.complete(requests)


def test_prompts_are_counted_once_and_split_by_source() -> None:
    core = sim_core()
    run(core, make_request("a", range(21), max_tokens=3))
    run(core, make_request("b", range(21), max_tokens=3))
    numbers = report(core)
    assert numbers.prompt_tokens == numbers.queried_tokens == 42
    assert numbers.cached_prompt_tokens == 20  # five full blocks; the last token is always computed
    assert numbers.generated_tokens == 6
    assert numbers.length_limited == 2
    assert numbers.computed_tokens == 21 + 1 + 2 * 2


def test_a_prompt_with_several_answers_is_counted_once() -> None:
    """They share what one of them computes; each has tokens, times and an end of its own."""
    core = sim_core()
    run(core, make_request("a", range(21), max_tokens=3))
    run(core, replace(make_request("b", range(25), max_tokens=3), n=3))
    numbers = report(core)
    assert numbers.prompt_tokens == numbers.queried_tokens == 21 + 25
    assert numbers.cached_prompt_tokens == 20
    assert numbers.computed_length.total == 21 + 5
    assert (numbers.generated_tokens, numbers.length_limited) == (12, 4)
    assert count(core, "first_token_s") == count(core, "prompt_length") == 4


def test_a_prefix_that_is_held_has_no_generated_token() -> None:
    core = sim_core(64, max_model_len=100)
    run(core, make_pin("p", range(20)))
    numbers = report(core)
    assert (numbers.prompt_tokens, numbers.generated_tokens) == (20, 0)


def test_without_a_prefix_cache_nothing_is_queried() -> None:
    core = sim_core(prefix_caching=False)
    run(core, make_request("a", range(21), max_tokens=1))
    assert (report(core).queried_tokens, report(core).prompt_tokens) == (0, 21)


def test_a_prompt_that_is_scored_queries_nothing() -> None:
    """No hit is wanted for it: it would count as a miss of what nobody looked up."""
    core = sim_core()
    [request] = core.take(make_request("a", range(21), max_tokens=1))
    request.is_scored = True
    core.step()
    assert (report(core).queried_tokens, report(core).prompt_tokens) == (0, 21)


def test_the_last_token_of_a_cached_prompt_is_no_decode() -> None:
    core = sim_core()
    run(core, make_request("a", range(21), max_tokens=1))
    run(core, make_request("b", range(21), max_tokens=3))
    numbers = report(core)
    assert numbers.cached_prompt_tokens == 20
    assert (numbers.computed_tokens, numbers.decode_tokens) == (21 + 1 + 2, 2)


def test_times_are_of_the_engines_clock_and_add_up() -> None:
    clock = VirtualClock()
    core = sim_core(sim=SIM, clock=clock)
    core.submit(make_request("a", range(10), max_tokens=3), arrival_s=-2.0)
    while core.has_work:
        core.step()
    numbers = report(core)
    assert numbers.queue_s.total == pytest.approx(2.0)
    assert numbers.prefill_s.total == pytest.approx(0.1 + 10 * 0.01)
    assert numbers.decode_s.total == pytest.approx(2 * 0.11)
    assert numbers.inter_token_s.total == pytest.approx(2 * 0.11)
    assert sum(numbers.inter_token_s.counts) == 2
    assert numbers.per_output_token_s.total == pytest.approx(0.11)
    assert numbers.first_token_s.total == pytest.approx(2.0 + 0.2)
    assert numbers.request_s.total == pytest.approx(
        numbers.queue_s.total + numbers.prefill_s.total + numbers.decode_s.total
    )
    assert numbers.step_tokens.total == 12
    assert numbers.inference_s.total == pytest.approx(numbers.prefill_s.total + numbers.decode_s.total)
    assert numbers.computed_length.total == 10
    assert (numbers.prompt_length.total, numbers.output_length.total, numbers.max_tokens.total) == (10, 3, 3)


def test_a_preempted_prompt_is_counted_once() -> None:
    """Its prefill runs twice; its tokens were asked for once."""
    core = sim_core(6, max_batched_tokens=64)
    run(core, *[make_request(name, range(8), max_tokens=8, salt=name) for name in "ab"])
    numbers = report(core)
    assert numbers.preemptions > 0
    assert numbers.prompt_tokens == 16
    assert numbers.generated_tokens == 16
    assert sum(numbers.first_token_s.counts) == sum(numbers.queue_s.counts) == 2


def test_a_continued_stream_counts_its_own_tokens_alone() -> None:
    core = sim_core()
    run(core, make_request("a", range(9), output=[1, 2, 3], max_tokens=5))
    numbers = report(core)
    assert (numbers.generated_tokens, numbers.output_length.total, numbers.prompt_tokens) == (2, 2, 9)


def test_a_continuation_that_was_at_its_end_has_no_times() -> None:
    core = sim_core()
    run(core, make_request("a", range(9), output=[1, 2, 3], max_tokens=3))
    assert report(core).length_limited == 1
    assert count(core, "request_s") == count(core, "first_token_s") == 0


def test_cancelled_late_failed_and_handed_over_ones_are_told_apart() -> None:
    clock = VirtualClock()
    core = sim_core(sim=SimConfig(raise_every_steps=1), clock=clock)
    core.submit(make_request("gone", range(9)))
    core.cancel(make_request("gone", range(9)).request_id)
    core.submit(make_request("elsewhere", range(9)))
    core.hand_over(make_request("elsewhere", range(9)).request_id)
    core.submit(make_request("late", range(9), deadline_s=1.0))
    clock.sleep(2.0)
    core.step()
    core.submit(make_request("failed", range(9)))
    core.step()
    numbers = report(core)
    assert (numbers.handed_over, numbers.aborted, numbers.failed) == (1, 2, 1)
    assert (numbers.stopped, numbers.length_limited) == (0, 0)
    assert numbers.failed_steps == 1
    assert count(core, "request_s") == 0


def test_the_state_is_that_of_the_moment() -> None:
    core = sim_core(max_running=1)
    for name in "ab":
        core.submit(make_request(name, range(3 * BLOCK_SIZE), max_tokens=4, salt=name))
    core.step()
    numbers = report(core)
    assert (numbers.num_running, numbers.num_waiting) == (1, 1)
    assert numbers.used_blocks == 3
    assert numbers.used_blocks <= numbers.cached_blocks <= numbers.total_blocks


def test_no_counter_ever_shrinks() -> None:
    core = sim_core(6, max_batched_tokens=5)
    for number, name in enumerate("abcd"):
        core.submit(make_request(name, range(8), max_tokens=6, salt=name, deadline_s=None))
        before = report(core)
        core.step()
        if number == 2:
            core.cancel(make_request("b", range(8)).request_id)
        assert_grown(before, report(core))
    while core.has_work:
        before = report(core)
        core.step()
        assert_grown(before, report(core))


def assert_grown(before: EngineReport, after: EngineReport) -> None:
    state = {"num_running", "num_waiting", "used_blocks", "cached_blocks", "version", "epoch", "number"}
    state |= {"pinned_blocks", "pins", "host_blocks", "swapped_blocks"}
    for name in EngineReport.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if name in state:
            continue
        if isinstance(old, int):
            assert new >= old, name
        else:
            assert all(b >= a for a, b in zip(old.counts, new.counts, strict=True)), name
            assert new.total >= old.total, name
