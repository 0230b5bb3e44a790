"""Laws of how long prompts may stall those that decode beside them. On the scheduler alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.scheduling.order import SchedulingOrder
from replica.scheduling.request import RequestState
from replica.scheduling.runner import StepResult
from replica.scheduling.step_room import limit_s
from tests.fakes.engine import BLOCK_SIZE
from tests.fakes.scheduling import BUDGET, Engine, Job


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
