"""Laws of how long prompts may stall those that decode beside them. On the scheduler alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.scheduling_order import SchedulingOrder
from replica.scheduling.layer_span import LayerSpan
from replica.scheduling.request import Halfway, Request, RequestState
from replica.scheduling.runner import StepResult
from replica.scheduling.step_plan import LEAST_PART
from replica.scheduling.step_room import OVER, limit_s
from replica.scheduling.step_time import step_work
from tests.fakes.engine import BLOCK_SIZE
from tests.fakes.scheduling import BUDGET, MODEL, Engine, Job

LEAST_TOKENS = int(LEAST_PART * BLOCK_SIZE)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=8),
    st.integers(1, 400),
    st.sampled_from([None, 0.05, 0.2]),
)
@settings(max_examples=80)
def test_a_long_prompt_stalls_decodes_for_no_longer_than_the_limit(
    answers: list[tuple[int, int]], length: int, itl_target_s: float | None
) -> None:
    """Or for a block of tokens, where not even that fits. And its prefill ends."""
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=itl_target_s)
    for number, (num_prompt, num_output) in enumerate(answers):
        engine.submit(number, Job(0.0, num_prompt, num_output))
    for _ in range(10):
        engine.step()
    long = engine.submit(99, Job(engine.now_s, length))
    while long.state is not RequestState.FINISHED:
        planned = engine.scheduler.plan()
        decodes = [(r, n) for r, n in planned if r is not long]
        chunk = next((n for r, n in planned if r is long), 0)
        alone_s = engine.time_of(decodes)
        step_s = engine.time_of(list(planned))
        if decodes and all(r.is_decoding for r, _ in decodes) and chunk > BLOCK_SIZE:
            assert step_s <= limit_s(alone_s, 1, itl_target_s) + 1e-9
        if all(r.is_decoding for r, _ in decodes):
            assert chunk > 0, "who is alone with decodes goes on in every step"
        tokens = tuple(0 if r.num_uncomputed == n else None for r, n in planned)
        for request in engine.scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            if request.num_output_tokens == request.max_output_tokens:
                engine.scheduler.finish(request)


@pytest.mark.parametrize("num_decodes", [0, 8])
def test_without_decodes_or_without_a_limit_steps_are_full(num_decodes: int) -> None:
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=None if num_decodes == 0 else math.inf)
    for number in range(num_decodes):
        engine.submit(number, Job(0.0, 2, 50))
    engine.step()
    engine.submit(99, Job(0.0, 1000))
    assert sum(n for _, n in engine.step()) == BUDGET


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(30, 60)), min_size=1, max_size=4),
    st.integers(20, 400),
    st.sampled_from([None, 0.001, 0.05, 0.2]),
    st.sampled_from([2, 6, 32]),
)
@settings(max_examples=80)
def test_a_prompt_goes_through_the_layers_as_time_allows(
    answers: list[tuple[int, int]], length: int, itl_target_s: float | None, num_layers: int
) -> None:
    """Span by span, and never more slowly than by the least of parts: each step is within the limit, or of as
    few layers as make up for that."""
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=itl_target_s, num_layers=num_layers)
    begun = [engine.submit(number, Job(0.0, *answer)) for number, answer in enumerate(answers)]
    while not all(each.num_output_tokens for each in begun):
        engine.step()
    long = engine.submit(99, Job(engine.now_s, length))
    through = 0.0  # of its tokens, each layer a part of it
    while long.state is not RequestState.FINISHED:
        sequences = engine.scheduler.schedule()
        last = sequences[-1]
        if (span := last.layers) is not None:
            decodes = sequences[:-1]
            assert all(each.num_new_tokens == 1 and each.layers is None for each in decodes)
            assert last.request_id == long.request_id
            alone_s = MODEL.step_s(*step_work(decodes))
            part_s = (MODEL.step_s(*step_work([replace(last, layers=None)])) - MODEL.base_s) * span.share
            layer_s = part_s / (span.end - span.first)
            least = -(-LEAST_TOKENS * num_layers // last.num_new_tokens)
            is_least = span.is_last or span.end - span.first <= max(1, least)
            assert alone_s + part_s <= limit_s(alone_s, 1, itl_target_s) + OVER * layer_s or is_least
            assert last.num_new_tokens * (span.end - span.first) >= LEAST_TOKENS * num_layers or span.is_last
            assert long.blocks.num_offered * BLOCK_SIZE <= last.start + last.num_new_tokens * span.is_last
            through += last.num_new_tokens * span.share
        tokens = tuple(0 if each.samples else None for each in sequences)
        for request in engine.scheduler.update(StepResult(tokens, elapsed_s=0.0)):
            if request.num_output_tokens == request.max_output_tokens:
                engine.scheduler.finish(request)
    assert through <= length + 1e-6


def test_what_decodes_leave_is_filled_by_layers() -> None:
    """Eight decodes take 37 ms of 50, and a token some 1.1: at once eight go beside them; through a third of
    the layers four times as many."""
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=0.05, num_layers=6)
    for number in range(8):
        engine.submit(number, Job(0.0, 2, 200))
    engine.step()
    long = engine.submit(99, Job(0.0, 300))
    seen = []
    for _ in range(7):
        sequences = engine.scheduler.schedule()
        last = sequences[-1]
        seen.append((last.start, last.num_new_tokens, last.layers))
        # Which layers come next depends on what these take.
        assert bool(engine.scheduler.parts_after(unseen=0)) == (last.layers is None)
        assert MODEL.step_s(*step_work(sequences)) <= 0.05
        engine.scheduler.update(StepResult(tuple(0 if each.samples else None for each in sequences), 0.0))
    spans = [LayerSpan(0, 2, 6), LayerSpan(2, 4, 6), LayerSpan(4, 6, 6)]
    assert seen == [(0, 12, None), *((12, 39, span) for span in spans), *((51, 38, span) for span in spans)]
    assert long.num_computed == 89


def halfway() -> tuple[Engine, Request]:
    """Eight decodes, and a prompt with 12 tokens computed and 39 through the first two of six layers."""
    engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=0.05, num_layers=6)
    for number in range(8):
        engine.submit(number, Job(0.0, 2, 200))
    engine.step()
    long = engine.submit(99, Job(0.0, 60))
    for _ in range(2):
        engine.scheduler.schedule()
        engine.scheduler.update(StepResult((0,) * 8 + (None,), 0.0))
    assert long.num_computed == 12
    assert long.halfway == Halfway(39, LayerSpan(0, 2, 6))
    return engine, long


def test_a_step_that_was_not_begun_leaves_the_part_where_it_was() -> None:
    engine, long = halfway()
    before = engine.scheduler.schedule()[-1]
    engine.scheduler.take_back()
    assert engine.scheduler.schedule()[-1] == before
    assert before.layers == LayerSpan(2, 4, 6)
    assert long.num_preemptions == 0


def test_a_part_whose_step_ran_out_of_memory_begins_with_the_first_layer() -> None:
    """It may have gone on: memory may run out behind the layers, where tokens are drawn."""
    engine, long = halfway()
    assert engine.scheduler.schedule()[-1].layers == LayerSpan(2, 4, 6)
    assert engine.scheduler.retreat()
    assert long.halfway is None


def test_a_part_that_is_put_back_begins_with_the_first_layer() -> None:
    engine, long = halfway()
    for _ in range(2):
        last = engine.scheduler.schedule()[-1]
        if last.layers == LayerSpan(4, 6, 6):  # its blocks were promised to others with this step
            engine.scheduler.take_back()
        else:
            engine.scheduler.update(StepResult((0,) * 8 + (None,), 0.0))
    assert long.state is RequestState.WAITING
    assert long.halfway is None


def test_what_is_halfway_is_begun_anew_where_nobody_decodes_any_more() -> None:
    engine, long = halfway()
    for request in list(engine.scheduler):
        if request is not long:
            engine.scheduler.cancel(request.request_id)
    [alone] = engine.scheduler.schedule()
    assert (alone.start, alone.num_new_tokens, alone.layers) == (12, 48, None)
    assert long.halfway is None


def test_more_prompts_are_given_more_time() -> None:
    """So that capacity is not given up: where many wait, steps are as large as they may be."""
    sizes = []
    for num_prompts in (1, 2, 4, 40):
        engine = Engine(SchedulingOrder.FIRST_COME, itl_target_s=None)
        for number in range(4):
            engine.submit(number, Job(0.0, 2, 50))
        engine.step()
        for number in range(10, 10 + num_prompts):
            engine.submit(number, Job(0.0, 500))
        sizes.append(sum(n for _, n in engine.step()))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[-1] == BUDGET
