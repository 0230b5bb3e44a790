"""When a step ends before it is full: the arithmetic by hand, and what a scheduler makes of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import StepTimeModel
from cache.scheduling_order import SchedulingOrder
from replica.scheduling.early_end import EarlyEnd
from replica.scheduling.request import Request
from tests.fakes.scheduling import BUDGET, Engine, Job

# A step takes 10 ms whatever is in it, and 1 ms a prompt token.
PACE = StepTimeModel(base_s=0.010, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.0)


def step(num_left: int, *, ending: int, num_decodes: int = 0, pace: StepTimeModel | None = PACE) -> EarlyEnd:
    """So many prompts are left once `ending` others are in it with their last parts."""
    end = EarlyEnd.beside(pace, num_decodes, 0, num_left + ending)
    for _ in range(ending):
        end.take(is_last=True)
    return end


@pytest.mark.parametrize(
    ("num_left", "ending", "fits"),
    [
        (1, 1, 30),  # 10 ms * 2 * 3 / 2
        (1, 2, 15),
        (1, 3, 10),
        (2, 1, 60),  # 10 ms * 3 * 4 / 2
        (9, 1, 550),
    ],
)
def test_a_part_is_left_for_the_next_step_where_more_is_waited_for_it_than_for_a_step(
    num_left: int, ending: int, fits: int
) -> None:
    end = step(num_left, ending=ending)
    assert not end.is_before(0, fits - 1)
    assert end.is_before(0, fits + 1)


def test_the_decodes_of_a_step_are_part_of_what_it_takes_anyway() -> None:
    pace = msgspec.structs.replace(PACE, per_sequence_s=0.002)
    assert step(1, ending=1, pace=pace).is_before(0, 40)
    assert not step(1, ending=1, num_decodes=8, pace=pace).is_before(0, 40)


def test_the_attention_of_a_part_counts() -> None:
    pace = msgspec.structs.replace(PACE, per_attention_s=1e-6)
    assert not step(1, ending=1, pace=pace).is_before(0, 20)
    assert step(1, ending=1, pace=pace).is_before(1000, 20)


def test_until_somebody_ends_with_it_a_step_is_filled_up() -> None:
    end = EarlyEnd.beside(PACE, 0, 0, 3)
    end.take(is_last=False)
    assert not end.is_before(0, 10**6)


def test_who_has_not_measured_steps_fills_them_up() -> None:
    assert not step(1, ending=5, pace=None).is_before(0, 10**6)


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 5000), st.integers(0, 5000))
def test_the_more_are_left_the_fuller_steps_are(num_left: int, ending: int, tokens: int, start: int) -> None:
    """And the more end with it, the sooner it ends."""
    if step(num_left + 1, ending=ending).is_before(start, tokens):
        assert step(num_left, ending=ending).is_before(start, tokens)
        assert step(num_left + 1, ending=ending + 1).is_before(start, tokens)


# --- on a scheduler -------------------------------------------------------------------------------


def beside_a_long_prompt(order: SchedulingOrder) -> tuple[Engine, Request, Request]:
    """One that has begun on 1,000 tokens, and has just been sent 8."""
    engine = Engine(order)
    long = engine.submit(0, Job(0.0, 1000))
    engine.step()
    return engine, long, engine.submit(1, Job(engine.now_s, 8))


def test_a_short_prompt_has_its_first_token_in_a_step_of_its_own() -> None:
    engine, long, short = beside_a_long_prompt(SchedulingOrder.SHORTEST_PREEMPTING)
    assert engine.step() == [(short, 8)]
    assert engine.step() == [(long, BUDGET)], "nothing is computed twice, and it goes on at once"
    assert long.num_computed == 2 * BUDGET
    assert engine.scheduler.num_early_steps == 1


@pytest.mark.parametrize("order", SchedulingOrder)
def test_where_nobody_stands_back_steps_are_full(order: SchedulingOrder) -> None:
    engine = Engine(order)
    engine.submit(0, Job(0.0, 8))
    engine.submit(1, Job(0.0, 1000))
    assert sum(tokens for _, tokens in engine.step()) == (8 if order.preempts else BUDGET)


def test_in_a_long_queue_steps_are_full() -> None:
    """Twenty wait: what a step takes anyway is paid as rarely as can be."""
    engine, _, short = beside_a_long_prompt(SchedulingOrder.SHORTEST_PREEMPTING)
    for number in range(2, 22):
        engine.submit(number, Job(engine.now_s, 500))
    planned = engine.step()
    assert planned[0] == (short, 8)
    assert sum(tokens for _, tokens in planned) == BUDGET


def test_what_is_computed_of_a_prompt_counts_in_its_next_part() -> None:
    """14 tokens alone take less than another step does, and not after 2,000 others."""
    for start, fits in [(1, True), (2000 // BUDGET + 1, False)]:
        engine = Engine(SchedulingOrder.SHORTEST_PREEMPTING)
        engine.submit(0, Job(0.0, 10_000))
        for _ in range(start):
            engine.step()
        engine.submit(1, Job(engine.now_s, BUDGET - 14))
        assert sum(tokens for _, tokens in engine.step()) == (BUDGET if fits else BUDGET - 14)


def test_what_those_who_decode_have_read_counts_in_the_step() -> None:
    """Beside four of them two prompts end; another step takes longer the more those have read."""
    for context, fits in [(4, False), (5000, True)]:
        engine = Engine(SchedulingOrder.SHORTEST_PREEMPTING, num_blocks=8192)
        readers = [engine.submit(number, Job(0.0, context, 1000)) for number in range(4)]
        while not all(request.is_decoding for request in readers):
            engine.step()
        engine.submit(10, Job(engine.now_s, 1000))
        engine.submit(11, Job(engine.now_s, 8))
        engine.submit(12, Job(engine.now_s, 8))
        tokens = sum(tokens for _, tokens in engine.step())
        assert tokens == (BUDGET if fits else 4 + 8 + 8)


def test_the_last_token_of_a_prompt_counts_although_it_is_computed_like_a_decode() -> None:
    """As of all but the first of several answers."""
    engine = Engine(SchedulingOrder.SHORTEST_PREEMPTING)
    one_left = engine.submit(0, Job(0.0, BUDGET + 1))
    engine.step()
    engine.submit(1, Job(engine.now_s, 1000))
    assert engine.step() == [(one_left, 1)]


def test_no_step_is_skipped_while_somebody_waits_for_the_next() -> None:
    engine = Engine(SchedulingOrder.SHORTEST_PREEMPTING)
    engine.submit(0, Job(0.0, 1, 20))
    engine.submit(1, Job(0.0, 1000))
    assert sum(tokens for _, tokens in engine.scheduler.plan()) == 1
    assert engine.scheduler.quiet_steps() == 0


def test_under_a_limit_that_follows_the_decodes_steps_are_full() -> None:
    """Who has a first token decodes: the long prompt would be held back for its whole answer."""
    engine = Engine(SchedulingOrder.SHORTEST_PREEMPTING, itl_target_s=None)
    engine.submit(0, Job(0.0, 8, 100))
    engine.submit(1, Job(0.0, 1000))
    assert sum(tokens for _, tokens in engine.step()) == BUDGET
