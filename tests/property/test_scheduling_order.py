"""Laws of the queue: who goes first, by order, priority and deadline. On the scheduler alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.priority import LEVEL_S, MAX_PRIORITY, MIN_PRIORITY
from cache.scheduling_order import AGING, SchedulingOrder
from replica.scheduling.request import RequestState
from tests.fakes.scheduling import BUDGET, MODEL, Engine, Job, orders, own_s

jobs_of_one = st.lists(
    st.builds(Job, st.floats(0, 20), st.integers(1, 300), st.integers(1, 12)), min_size=2, max_size=20
)


@given(jobs_of_one, orders, st.sampled_from([80, 160, 4096]), st.integers(1, 8))
@settings(max_examples=100)
def test_nobody_is_overtaken_for_longer_than_the_bound(
    jobs: list[Job], order: SchedulingOrder, num_blocks: int, max_running: int
) -> None:
    """Who comes more than own prefill / AGING later starts later: whatever is short of places or blocks."""
    engine = Engine(order, num_blocks=num_blocks, max_running=max_running)
    engine.run(jobs)
    assert sorted(engine.started) == list(range(len(jobs)))
    place = {number: position for position, number in enumerate(engine.started)}
    for early, job in enumerate(jobs):
        patience_s = 0.0 if order is SchedulingOrder.FIRST_COME else own_s(job) / AGING
        for late, other in enumerate(jobs):
            if other.arrival_s > job.arrival_s + patience_s + 1e-9:
                assert place[early] < place[late]


@given(jobs_of_one, orders, st.integers(1, 8), st.sampled_from([math.inf, None, 0.03]))
@settings(max_examples=80)
def test_everybody_ends_whatever_the_order(
    jobs: list[Job], order: SchedulingOrder, max_running: int, itl_target_s: float | None
) -> None:
    """In a pool that holds one of the longest and little else, so that blocks end inside of prompts."""
    engine = Engine(order, num_blocks=80, max_running=max_running, itl_target_s=itl_target_s)
    engine.run(jobs)
    assert len(engine.ended_s) == len(jobs)
    stats = engine.cache.stats()
    assert (stats.used, stats.free) == (0, stats.total)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=12, unique=True))
def test_shortest_first_is_the_order_of_length(lengths: list[int]) -> None:
    """Of those that come together, when one place is free at a time."""
    engine = Engine(SchedulingOrder.SHORTEST, max_running=1)
    engine.run([Job(0.0, length) for length in lengths])
    assert [lengths[number] for number in engine.started] == sorted(lengths)


@given(
    st.integers(50, 300), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0.0, 2.0), orders
)
def test_who_has_waited_at_a_router_has_its_age(
    long: int, shorts: list[int], share: float, order: SchedulingOrder
) -> None:
    """A long prompt is overtaken by those that came within its own prefill / AGING, wherever it was then."""
    engine, first = Engine(order, max_running=1), Job(0.0, long)
    waited_s = share * own_s(first) / AGING
    engine.run([replace(first, waited_s=waited_s), *(Job(0.0, length) for length in shorts)])
    overtaken_by = engine.started[: engine.started.index(0)]
    if order is SchedulingOrder.FIRST_COME or share > 1.001:
        assert overtaken_by == []
    elif share < 0.001:
        assert len(overtaken_by) == len(shorts)


def test_a_long_prompt_stands_back_and_keeps_its_blocks() -> None:
    """With preemption a short one is computed in the next step; without, after the long one's last chunk."""
    ended = {}
    for order in SchedulingOrder:
        engine = Engine(order)
        long = engine.submit(0, Job(0.0, 10 * BUDGET))
        engine.step()
        engine.submit(1, Job(engine.now_s, 20))
        held = list(long.blocks.block_table)
        engine.step()
        assert long.blocks.block_table[: len(held)] == held
        assert long.num_preemptions == 0
        while len(engine.scheduler):
            engine.step()
        ended[order] = (engine.first_token_s[1], engine.first_token_s[0])
    short_first, long_last = ended[SchedulingOrder.SHORTEST_PREEMPTING]
    assert short_first < ended[SchedulingOrder.SHORTEST][0] / 4
    assert ended[SchedulingOrder.SHORTEST] == ended[SchedulingOrder.FIRST_COME]
    assert long_last <= ended[SchedulingOrder.SHORTEST][1] + MODEL.step_s(BUDGET, 1e4, 2)


# -- priorities and deadlines ---------------------------------------------------------------------

urgent_jobs = st.lists(
    st.builds(
        Job,
        st.floats(0, 60),
        st.integers(1, 300),
        st.integers(1, 12),
        priority=st.integers(-2, 2) | st.integers(MIN_PRIORITY, MAX_PRIORITY),
    ),
    min_size=2,
    max_size=20,
)


@given(urgent_jobs, orders, st.sampled_from([80, 160, 4096]), st.integers(1, 8))
@settings(max_examples=100)
def test_priority_overtakes_by_its_seconds_and_no_more(
    jobs: list[Job], order: SchedulingOrder, num_blocks: int, max_running: int
) -> None:
    """Who comes so many seconds later that no level makes up for them starts later: so nobody starves."""
    engine = Engine(order, num_blocks=num_blocks, max_running=max_running)
    engine.run(jobs)
    place = {number: position for position, number in enumerate(engine.started)}
    for early, job in enumerate(jobs):
        patience_s = 0.0 if order is SchedulingOrder.FIRST_COME else own_s(job) / AGING
        for late, other in enumerate(jobs):
            lead_s = max(0.0, patience_s + LEVEL_S * (job.priority - other.priority))
            # A job is put here at the end of the step that it comes in, of half a second at most.
            if other.arrival_s > job.arrival_s + lead_s + 0.5:
                assert place[early] < place[late]


@given(st.lists(st.integers(MIN_PRIORITY, MAX_PRIORITY), min_size=2, max_size=12, unique=True), orders)
def test_of_those_that_wait_the_most_urgent_goes_first(levels: list[int], order: SchedulingOrder) -> None:
    engine = Engine(order, max_running=1)
    engine.run([Job(0.0, 40, priority=level) for level in levels])
    assert [levels[number] for number in engine.started] == sorted(levels)


@pytest.mark.parametrize("order", SchedulingOrder)
def test_a_level_is_as_many_seconds_of_age_in_every_order(order: SchedulingOrder) -> None:
    """The only place is taken until all have come."""
    later = Job(0.1, 40, priority=1)
    before = replace(later, arrival_s=0.1 + LEVEL_S - 0.2, priority=0)
    behind = replace(later, arrival_s=0.1 + LEVEL_S + 0.2, priority=0)
    engine = Engine(order, max_running=1)
    engine.run([Job(0.0, 4, 800), later, before, behind])
    assert engine.started == [0, 2, 1, 3]


def test_a_begun_prompt_stands_back_for_a_more_urgent_one_and_keeps_its_blocks() -> None:
    """Not for one that is as urgent: and nobody who runs is thrown out for it."""
    for level, comes_first in ((0, False), (-1, True), (1, False)):
        engine = Engine(SchedulingOrder.FIRST_COME)
        long = engine.submit(0, Job(0.0, 10 * BUDGET))
        engine.step()
        engine.submit(1, Job(engine.now_s, 20, priority=level))
        held = list(long.blocks.block_table)
        engine.step()
        assert long.blocks.block_table[: len(held)] == held
        assert (1 in engine.first_token_s) is comes_first
        while len(engine.scheduler):
            engine.step()
        assert long.num_preemptions == 0


def test_an_urgent_twin_does_not_wait_for_who_is_less_urgent() -> None:
    """It finds nothing cached then, and computes the prompt itself."""
    engine = Engine(SchedulingOrder.FIRST_COME, max_running=1)
    engine.submit(0, Job(0.0, 40))
    engine.step()
    engine.submit(1, Job(0.0, 4, 100))  # keeps the only place for a while
    later = engine.submit(2, Job(0.0, 40, priority=5), twin_of=2)
    twin = engine.submit(3, Job(0.0, 40), twin_of=2)
    assert twin.expected_hit > 0
    while 3 not in engine.started:
        engine.step()
    assert twin.cached_tokens == 0
    assert 2 not in engine.started
    assert later.state is RequestState.WAITING


@given(st.lists(st.tuples(st.integers(20, 300), st.floats(0.05, 3.0)), min_size=1, max_size=12))
def test_who_cannot_be_answered_in_time_is_told_before_it_is_begun(sizes: list[tuple[int, float]]) -> None:
    """And nobody is told who could start in time: by what steps take, which here is what they take.

    Nor is the last one that is here."""
    engine = Engine(SchedulingOrder.FIRST_COME, max_running=1)
    jobs = [Job(0.0, length, expires_s=left_s) for length, left_s in sizes]
    requests = [engine.submit(number, job) for number, job in enumerate(jobs)]
    while len(engine.scheduler):
        for request, error in engine.scheduler.expire():
            number, job = requests.index(request), jobs[requests.index(request)]
            assert job.expires_s is not None
            if number not in engine.started:
                assert engine.now_s + own_s(job) >= job.expires_s - 1e-9
                assert error.deadline_s == job.expires_s
                assert (error.prefill_s is None) == (engine.now_s >= job.expires_s)
        waiting = [r for r in requests if r.state is RequestState.WAITING and r.admitted_s is None]
        for request in waiting:
            job = jobs[requests.index(request)]
            assert job.expires_s is not None
            assert engine.now_s + own_s(job) < job.expires_s or len(engine.scheduler) == 1
        if len(engine.scheduler):
            engine.step()


def test_steps_believed_too_slow_for_every_deadline_are_tried_again() -> None:
    """One at a time: else nothing would ever be begun that could prove them quicker."""
    engine = Engine(SchedulingOrder.FIRST_COME)
    hopeless = Job(0.0, 200, expires_s=0.2)
    assert own_s(hopeless) > 0.2
    for number in range(3):
        engine.submit(number, hopeless)
    told = {request.request_id for request, _ in engine.scheduler.expire()}
    assert told == {"1", "2"}
    engine.step()
    assert engine.started == [0]
    engine.submit(3, hopeless)
    assert [request.request_id for request, _ in engine.scheduler.expire()] == ["3"]  # somebody else runs
