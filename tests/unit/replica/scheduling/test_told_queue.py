"""What an engine tells of its queue is what is queued, in the order in which it is computed."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cache.events import MAX_QUEUED_TOLD, Load
from cache.scheduling_order import AGING, SchedulingOrder
from replica.scheduling.told_queue import QueuedPrompt, told_queue
from tests.fakes.scheduling import BUDGET, MODEL, Engine, Job, orders

SHORTEST = SchedulingOrder.SHORTEST_PREEMPTING
lengths = st.lists(st.integers(1, 400), min_size=1, max_size=12, unique=True)


def num_told(load: Load) -> int:
    return sum([len(of.tokens) + of.num_more for of in load.queued])


def tokens_told(load: Load) -> int:
    return sum([sum(of.tokens) + of.more_tokens for of in load.queued])


@given(
    st.lists(
        st.builds(
            Job,
            st.floats(0, 5),
            st.integers(1, 300),
            st.integers(1, 4),
            tenant=st.sampled_from("abc"),
            priority=st.integers(-1, 1),
        ),
        min_size=1,
        max_size=16,
    ),
    orders,
)
@settings(max_examples=60)
def test_all_that_is_queued_is_told_of_once(jobs: list[Job], order: SchedulingOrder) -> None:
    engine = Engine(order)
    coming = sorted(enumerate(jobs), key=lambda item: item[1].arrival_s)
    while coming or len(engine.scheduler):
        while coming and coming[0][1].arrival_s <= engine.now_s:
            engine.submit(*coming.pop(0))
        load = engine.scheduler.load()
        unfinished = [r for r in engine.scheduler if not r.is_decoding]
        assert tokens_told(load) == load.queued_uncached_tokens
        assert num_told(load) == len(unfinished)
        assert {of.tenant for of in load.queued} == {r.tenant for r in unfinished}
        for of in load.queued:
            assert list(of.places) == sorted(of.places)
            assert len(of.places) == (len(of.tokens) if order.preempts else 0)
        engine.step()


@given(lengths, st.integers(0, 3))
def test_one_tenants_prompts_are_told_of_in_the_order_of_their_first_tokens(
    sizes: list[int], num_steps: int
) -> None:
    engine = Engine(SHORTEST)
    for number, size in enumerate(sizes):
        engine.submit(number, Job(0.0, size))
    for _ in range(num_steps):
        engine.step()
    left = {r.num_uncomputed: int(r.request_id) for r in engine.scheduler if not r.is_decoding}
    assume(len(left) == len(engine.scheduler))
    told = [tokens for of in engine.scheduler.load().queued for tokens in of.tokens]
    assert sorted(told) == sorted(left)
    while len(engine.scheduler):
        engine.step()
    served_s = [engine.first_token_s[left[tokens]] for tokens in told]
    assert served_s == sorted(served_s)


def test_places_are_as_of_now() -> None:
    """What a reader's newcomer is compared with needs no clock but its own."""
    engine = Engine(SHORTEST)
    engine.submit(0, Job(0.0, 10 * BUDGET))
    [of] = engine.scheduler.load().queued
    own_s = MODEL.prefill_s(10 * BUDGET, 0, BUDGET)
    assert of.places == (own_s,)
    engine.now_s += 4.0
    [of] = engine.scheduler.load().queued
    assert of.places == (own_s - 4.0 * AGING,)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 50)), max_size=400))
def test_of_a_long_queue_the_first_are_told_of_and_the_sums_of_the_rest(
    prompts: list[tuple[str, int]],
) -> None:
    queue = [QueuedPrompt(tenant, 1.0, float(tokens), tokens) for tenant, tokens in prompts]
    told = told_queue(queue, SHORTEST, 0.0, told=(), told_at=0.0)
    assert sum(len(of.places) for of in told) <= MAX_QUEUED_TOLD
    for of in told:
        own = sorted(tokens for tenant, tokens in prompts if tenant == of.tenant)
        assert list(of.tokens) == own[: len(of.tokens)]
        assert (of.num_more, of.more_tokens) == (len(own) - len(of.tokens), sum(own) - sum(of.tokens))


def test_of_a_long_queue_an_engine_tells_the_first_and_the_sums_of_the_rest() -> None:
    """Also where one that has begun is behind those that wait."""
    engine = Engine(SHORTEST)
    engine.submit(0, Job(0.0, 50 * BUDGET))
    engine.step()
    sizes = [*range(20, 20 + 2 * MAX_QUEUED_TOLD)]
    for number, size in enumerate(reversed(sizes), start=1):
        engine.submit(number, Job(engine.now_s, size))
    load = engine.scheduler.load()
    [of] = load.queued
    assert of.tokens == tuple(sizes[:MAX_QUEUED_TOLD])
    assert of.num_more == MAX_QUEUED_TOLD + 1
    assert sum(of.tokens) + of.more_tokens == load.queued_uncached_tokens


def test_of_a_crowd_of_tenants_as_many_are_told_of_as_a_load_may_have() -> None:
    queue = [QueuedPrompt(str(number), 1.0, 0.0, 7) for number in range(3 * MAX_QUEUED_TOLD)]
    told = told_queue(queue, SHORTEST, 0.0, told=(), told_at=0.0)
    assert len(told) == MAX_QUEUED_TOLD
    assert all(of.tokens == (7,) for of in told)
