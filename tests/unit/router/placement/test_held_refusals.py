"""Requests that wait at the router: who may not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cache.events import StepTimeModel
from cache.types import RequestId
from router.errors import AllBusy
from router.placement.decision import Admittance, RouteQuery
from router.placement.overload import YOUNG
from tests.fakes.held import OPTIONS, TOKEN_S, A, B, HoldingRouter
from tests.fakes.router import BLOCK_SIZE, load, query, replica_id


@pytest.fixture
def router() -> HoldingRouter:
    return HoldingRouter()


def test_too_many_are_refused_with_a_time_to_come_back(router: HoldingRouter) -> None:
    router.report(A, backlog_s=100.0)
    for index in range(10):
        router.submit(f"q{index}", 600)
    with pytest.raises(AllBusy) as caught:
        router.submit("one too many")
    assert caught.value.num_replicas == 1
    assert caught.value.retry_after_s == pytest.approx(0.96 + 19 * 0.011, rel=0.1)  # until one has left
    assert RequestId("one too many") not in router.held
    router.held.submit(query("let in before", is_again=True))
    assert router.held.withdraw(RequestId("let in before"))
    assert router.held.withdraw(RequestId("q3"))
    router.submit("now there is room")


def test_who_would_wait_too_long_is_refused_and_told_when_there_will_be_room() -> None:
    """Three replicas with 1, 2 and 6 s of backlog, and 3 s held. The level is 3 s on the first two."""
    router = HoldingRouter(3, options=replace(OPTIONS, max_wait_s=2.6, max_held_per_replica=100))
    for index, backlog_s in enumerate((1.0, 2.0, 6.0)):
        router.report(replica_id(index), backlog_s=backlog_s)
    num_blocks = round(1.0 / TOKEN_S / BLOCK_SIZE)
    for name in "abc":
        router.submit(name, num_blocks)  # of a second each, the level then 2.0, 2.5 and 3.0
    with pytest.raises(AllBusy) as caught:
        router.submit("d")
    assert caught.value.retry_after_s == 1.0  # sooner than anybody is told to come back
    assert len(router.held) == 3
    assert router.routing.statistics().all_busy == 1
    state = router.held.queue_state()
    assert (state.bound_s, state.is_overload) == (2.6, False)
    assert state.wait_s == pytest.approx(3.0, abs=0.05)
    router.clock.advance(0.6)
    router.submit("d")  # time has made room, nobody else has


def test_in_overload_those_let_in_before_it_was_known_wait_no_longer_than_others() -> None:
    """One replica, prompts of 0.1 s, twenty a second: at other times they may wait for ten seconds."""
    options = replace(OPTIONS, max_wait_s=10.0, overload_wait_s=0.5, max_held_per_replica=1000)
    router = HoldingRouter(options=options)
    num_blocks, backlog_s, refused, late = round(0.1 / TOKEN_S / BLOCK_SIZE), 0.0, [], []
    for number in range(120):
        router.report(A, backlog_s=backlog_s)
        try:
            router.submit(f"{number}", num_blocks)
        except AllBusy:
            refused.append(number)
        departures = router.held.poll()
        backlog_s += 0.1 * sum(departure.placement is not None for departure in departures)
        late += [departure for departure in departures if departure.error is not None]
        backlog_s = max(0.0, backlog_s - 0.05)
        router.clock.advance(0.05)
    first_s = refused[0] * 0.05
    assert YOUNG * 10.0 <= first_s <= 4.0
    assert len(refused) >= (6.0 - first_s) * 20 / 2 * 0.8
    assert late
    assert all(isinstance(each.error, AllBusy) for each in late)
    assert all(each.waited_s >= 1.5 * 0.5 for each in late)
    assert router.routing.statistics().all_busy == len(refused) + len(late)
    assert len(router.held) * 0.1 <= 0.5 + 0.2
    state = router.held.queue_state()
    assert (state.bound_s, state.is_overload) == (0.5, True)
    lost = query("lost", 1, excluded=frozenset({B}), is_again=True)
    router.held.submit(lost, since=router.clock() - 60.0)  # may have begun to answer
    assert all(each.error is None for each in router.held.poll())


def overloaded(router: HoldingRouter, sent: dict[int, list[RouteQuery]]) -> dict[RequestId, AllBusy | None]:
    """Prompts of 0.1 s, twenty a second for five seconds, and others beside those of some numbers: what they
    came to here, None for those that were placed."""
    num_blocks, backlog_s, ends = round(0.1 / TOKEN_S / BLOCK_SIZE), 0.0, dict[RequestId, AllBusy | None]()
    for number in range(100):
        router.report(A, backlog_s=backlog_s)
        for asked in [*sent.get(number, ()), query(f"{number}", num_blocks)]:
            try:
                router.held.submit(asked)
            except AllBusy as error:
                ends[asked.request_id] = error
        departures = router.held.poll()
        for departure in departures:
            assert departure.error is None or isinstance(departure.error, AllBusy)
            ends[departure.request_id] = departure.error
        placed = sum(departure.placement is not None for departure in departures)
        backlog_s = max(0.0, backlog_s + 0.1 * placed - 0.05)
        router.clock.advance(0.05)
    assert router.held.queue_state().is_overload
    return ends


def a_body(name: str, num_blocks: Sequence[int]) -> list[RouteQuery]:
    """The prompts of one HTTP request."""
    shared, part = Admittance(), 1 / len(num_blocks)
    return [
        query(f"{name} {index}", blocks, part=part, admittance=shared)
        for index, blocks in enumerate(num_blocks)
    ]


def test_what_came_together_is_refused_as_one_or_not_at_all() -> None:
    """Of a batch the short prompts had been computed when the long ones were refused, in overload, and the
    client got a 429 for all of them."""
    options = replace(OPTIONS, max_wait_s=10.0, overload_wait_s=0.5, max_held_per_replica=1000, window=4)
    short, long = round(0.02 / TOKEN_S / BLOCK_SIZE), round(0.8 / TOKEN_S / BLOCK_SIZE)
    begun, waiting = a_body("begun", [short, long, long]), a_body("waiting", [long, long, long])
    ends = overloaded(HoldingRouter(options=options), {2: begun, 10: waiting})
    assert ends[begun[0].request_id] is None
    assert [ends.get(each.request_id) for each in begun] == [None, None, None]
    assert all(isinstance(ends[each.request_id], AllBusy) for each in waiting)


@pytest.mark.parametrize(("prompts_each", "is_overload"), [(20, False), (1, True)])
def test_a_few_batches_are_no_overload_however_many_prompts_they_have(
    prompts_each: int, is_overload: bool
) -> None:
    """One replica, eight times twenty prompts in eight seconds; in overload 0.1 s may be waited."""
    options = replace(OPTIONS, max_wait_s=20.0, overload_wait_s=0.1, max_held_per_replica=1000)
    router, num_refused = HoldingRouter(options=options), 0
    router.report(A, backlog_s=10.0)
    for number in range(160):
        asked = query(f"{number}", round(0.1 / TOKEN_S / BLOCK_SIZE), part=1 / prompts_each)
        try:
            router.held.submit(asked)
        except AllBusy:
            num_refused += 1
        if number % 20 == 19:
            router.clock.advance(1.0)
    assert (num_refused > 0) == router.held.queue_state().is_overload == is_overload


def test_what_a_lost_replica_had_under_way_is_no_overload() -> None:
    """It comes back in one moment; in overload 0.1 s may be waited."""
    options = replace(OPTIONS, max_wait_s=20.0, overload_wait_s=0.1, max_held_per_replica=1000)
    router = HoldingRouter(options=options)
    router.report(A, backlog_s=10.0)
    router.submit("first")
    router.clock.advance(8.0)
    for number in range(40):
        router.held.submit(query(f"{number}", 150, excluded=frozenset({B}), is_again=True))
    assert router.held.queue_state().wait_s == pytest.approx(2.0 + 11.5, abs=0.5)
    router.submit("new")
    assert not router.held.queue_state().is_overload


def test_those_turned_away_are_not_told_to_come_back_together() -> None:
    router = HoldingRouter(options=replace(OPTIONS, max_wait_s=2.0))
    router.report(A, backlog_s=5.0)
    num_blocks = round(1.0 / TOKEN_S / BLOCK_SIZE)
    told = []
    for name in "abcd":
        with pytest.raises(AllBusy) as caught:
            router.submit(name, num_blocks)
        told.append(caught.value.retry_after_s)
    assert told == pytest.approx([3.0, 4.0, 5.0, 6.0], abs=0.1)


def test_an_idle_replica_takes_whoever_comes() -> None:
    """Though others wait here: for the one that holds their prefix."""
    router = HoldingRouter(2, options=replace(OPTIONS, max_wait_s=0.5))
    router.report(A, backlog_s=0.4)
    only_a = frozenset({B})
    for name in "abc":
        router.held.submit(query(name, 300, excluded=only_a, is_again=True))
    router.submit("new", 300)
    assert router.poll() == ["new"]


def test_an_idle_replica_that_nobody_wants_lets_nobody_in() -> None:
    """It once measured itself as a hundred times slower, and whoever came in the meantime was taken in."""
    router = HoldingRouter(2, options=replace(OPTIONS, max_wait_s=1.0, max_held_per_replica=1000))
    slow = StepTimeModel(1.0, 0.01, 0.0, 0.1)
    router.report(A, backlog_s=0.5)
    router.routing.on_load(B, load(step_time=slow))
    for number in range(100):
        with contextlib.suppress(AllBusy):
            router.submit(str(number), 100)
    assert 3 <= len(router.held) <= 15
    assert router.poll() == []


def test_taken_for_places_a_replica_is_waited_for_though_nothing_is_queued() -> None:
    """64 sequences of 8 s each: one ends every 0.125 s, and 40 wait for that."""
    router = HoldingRouter(options=replace(OPTIONS, max_wait_s=5.0))
    placement = router.routing.choose(query("first"))
    router.routing.first_token(placement.request_id, A, 0)
    router.clock.advance(8.0)
    router.routing.release(placement.request_id)
    router.report(A, num_running=64, num_waiting=38)
    router.submit("still in time")
    router.report(A, num_running=64, num_waiting=40)
    with pytest.raises(AllBusy):
        router.submit("too late")


def test_a_deadline_that_cannot_be_met_is_not_waited_for(router: HoldingRouter) -> None:
    """Behind what goes before it, not behind what is held for later."""
    router.report(A, backlog_s=1.0)
    now = router.clock()
    router.submit("long", 1000)  # two seconds
    router.submit("short", 10, deadline=now + 1.1)
    with pytest.raises(AllBusy) as caught:
        router.submit("hopeless", 1100, deadline=now + 4.0)
    assert caught.value.retry_after_s == pytest.approx(1.0 + 2.0 + 2.1 - 4.0, abs=0.1)
    router.submit("in time", 1100, deadline=now + 6.0)


def test_unmeasured_replicas_are_bounded_by_tokens() -> None:
    """256 full steps of 512 count as the longest wait."""
    router = HoldingRouter(options=replace(OPTIONS, max_wait_s=10.0))
    router.report(A, num_waiting=3, step_time=None)
    router.routing.on_load(A, load(queued_uncached_tokens=256 * 512 - 100, num_waiting=3, step_time=None))
    router.submit("fits")
    router.routing.on_load(A, load(queued_uncached_tokens=256 * 512 + 100, num_waiting=3, step_time=None))
    with pytest.raises(AllBusy):
        router.submit("too much")


@pytest.mark.parametrize(
    ("deadline_s", "ratio"),
    [
        pytest.param(None, 2.0, id="refused by the bound"),
        pytest.param(2.5, 2.0, id="in time, were nobody before it"),
        pytest.param(1.5, 0.0, id="too late on an idle replica, too"),
    ],
)
def test_what_one_more_replica_would_have_done_counts_as_refused_work(
    deadline_s: float | None, ratio: float
) -> None:
    """One second is placed; two are refused behind two that are queued."""
    router = HoldingRouter(options=replace(OPTIONS, max_wait_s=1.9 if deadline_s is None else 5.0))
    num_blocks = round(1.0 / TOKEN_S / BLOCK_SIZE)
    router.submit("goes", num_blocks)
    assert router.poll() == ["goes"]
    router.report(A, backlog_s=2.0)
    times = {} if deadline_s is None else {"deadline": router.clock() + deadline_s}
    with pytest.raises(AllBusy):
        router.submit("refused", 2 * num_blocks, **times)
    assert router.held.refused_ratio == pytest.approx(ratio, rel=0.02)


def test_who_is_held_or_gone_is_not_refused_work(router: HoldingRouter) -> None:
    """What waits is told as such, and who leaves, or runs out of time, is nobody's work any more."""
    router.submit("goes", 100)
    assert router.poll() == ["goes"]
    router.report(A, backlog_s=2.0)
    router.submit("leaves", 100)
    router.submit("overdue", 100, deadline=router.clock() + 3.0)
    router.held.withdraw(RequestId("leaves"))
    router.report(A, backlog_s=6.0)
    router.clock.advance(3.1)
    assert [departure.error is None for departure in router.held.poll()] == [False]
    assert router.held.refused_ratio == 0.0
