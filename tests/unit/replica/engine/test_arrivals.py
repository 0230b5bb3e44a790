"""What has arrived since the engine last spoke."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import MAX_ADMITTED_PER_BATCH, Load, QueuedPrompts, RequestEnded, StepTimeModel
from cache.scheduling_order import AGING, SchedulingOrder
from cache.types import HashHint, RequestId
from replica.engine.arrivals import MAX_EXPECTED_S, MAX_RECENT, Arrival, Arrivals

SHORTEST = SchedulingOrder.SHORTEST_PREEMPTING
PACE = StepTimeModel(base_s=0.0, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.0)


def rid(*names: str) -> tuple[RequestId, ...]:
    return tuple(map(RequestId, names))


def new_arrivals() -> Arrivals:
    return Arrivals(SHORTEST, 512)


def arrival(name: str, num_tokens: int = 10, hints: tuple[int, ...] = ()) -> Arrival:
    return Arrival(RequestId(name), num_tokens, tuple(map(HashHint, hints)), 4)


def test_an_arrival_waits_until_the_engine_names_it() -> None:
    arrivals = new_arrivals()
    arrivals.settle(Load(queued_uncached_tokens=100, num_waiting=2, num_running=1), 0.0, ())
    arrivals.arrived(arrival("a", 10), (), 0.0)
    arrivals.arrived(arrival("b", 7), (), 0.0)
    load = arrivals.load(0.0, arrivals.take_unnamed())
    assert (load.queued_uncached_tokens, load.num_waiting, load.num_running) == (117, 4, 1)
    assert load.admitted == rid("a", "b")
    assert arrivals.take_unnamed() == ()
    arrivals.settle(Load(queued_uncached_tokens=10, num_waiting=1, admitted=rid("a")), 1.0, ())
    load = arrivals.load(1.0, ())
    assert (load.queued_uncached_tokens, load.num_waiting, len(arrivals)) == (17, 2, 1)
    arrivals.refused(RequestId("b"))
    arrivals.refused(RequestId("nobody"))
    assert arrivals.load(1.0, ()).num_waiting == 1
    assert len(arrivals) == 0


def test_what_has_ended_is_in_the_engines_own_account_alone() -> None:
    """Updates and snapshots would repeat it until the next batch."""
    arrivals, ended = new_arrivals(), (RequestEnded(RequestId("gone"), 0, 3),)
    arrivals.settle(Load(ended=ended), 0.0, ())
    assert arrivals.beside(0.0).ended == ended
    arrivals.arrived(arrival("a"), (), 0.0)
    assert arrivals.beside(0.0).ended == ended
    assert arrivals.load(0.0, ()).ended == ()


def test_what_is_cached_or_on_its_way_is_not_counted() -> None:
    """Twins at the door are computed once: the second finds the first one's blocks."""
    arrivals = new_arrivals()
    cached = {HashHint(1), HashHint(2)}
    arrivals.arrived(arrival("a", 21, (1, 2, 3, 4, 5)), cached, 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 21 - 8
    arrivals.arrived(arrival("twin", 21, (1, 2, 3, 4, 5)), cached, 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 13 + 1
    arrivals.refused(RequestId("a"))
    arrivals.refused(RequestId("twin"))
    arrivals.arrived(arrival("later", 21, (1, 2, 3, 4, 5)), cached, 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 13


def test_a_twin_finds_what_is_being_computed() -> None:
    """The engine has named the first, and is inside the step that computes it: the cache does not show it."""
    arrivals = new_arrivals()
    arrivals.arrived(arrival("a", 21, (1, 2, 3, 4, 5)), (), 0.0)
    named = Load(queued_uncached_tokens=21, num_running=1, admitted=rid("a"))
    arrivals.settle(named, 0.0, ())
    arrivals.arrived(arrival("twin", 21, (1, 2, 3, 4, 5)), (), 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 21 + 1
    arrivals.settle(Load(num_running=2, admitted=rid("twin")), 0.1, {HashHint(5)})
    arrivals.arrived(arrival("after", 21, (1, 2, 3, 4, 5)), (), 0.0)  # evicted at once
    assert arrivals.load(0.1, ()).queued_uncached_tokens == 21


def test_what_was_never_computed_is_not_expected_for_ever() -> None:
    arrivals = new_arrivals()
    arrivals.arrived(arrival("a", 21, (1, 2, 3, 4, 5)), (), 0.0)
    arrivals.settle(Load(admitted=rid("a")), 0.0, ())
    arrivals.settle(Load(), 2 * MAX_EXPECTED_S, ())
    arrivals.arrived(arrival("twin", 21, (1, 2, 3, 4, 5)), (), 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 21


def test_at_least_one_token_is_computed() -> None:
    arrivals = new_arrivals()
    arrivals.arrived(arrival("a", 8, (1, 2)), {HashHint(1), HashHint(2)}, 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 1


def test_what_the_engine_had_queued_runs_down_at_its_own_pace() -> None:
    arrivals = new_arrivals()
    arrivals.settle(Load(queued_uncached_tokens=100, num_waiting=1, step_time=PACE), 5.0, ())
    assert arrivals.load(5.0, ()).queued_uncached_tokens == 100
    assert arrivals.load(5.025, ()).queued_uncached_tokens in (74, 75)
    assert arrivals.load(7.0, ()).queued_uncached_tokens == 0
    arrivals.settle(Load(queued_uncached_tokens=100), 8.0, ())  # pace unknown: nothing is assumed
    assert arrivals.load(9.0, ()).queued_uncached_tokens == 100


def test_a_second_of_the_same_name_is_not_counted_twice() -> None:
    arrivals = new_arrivals()
    arrivals.arrived(arrival("a", 10), (), 0.0)
    arrivals.arrived(arrival("a", 99), (), 0.0)
    assert arrivals.load(0.0, ()).queued_uncached_tokens == 10
    assert arrivals.take_unnamed() == rid("a")


def test_a_refused_one_is_named_nowhere() -> None:
    arrivals = new_arrivals()
    arrivals.arrived(arrival("a"), (), 0.0)
    assert arrivals.has_news
    arrivals.refused(RequestId("a"))
    assert not arrivals.has_news
    assert arrivals.recent() == ()


def test_recent_ones_are_remembered_but_not_for_ever() -> None:
    arrivals = new_arrivals()
    names = [RequestId(str(number)) for number in range(MAX_RECENT + 5)]
    arrivals.settle(Load(admitted=tuple(names)), 0.0, ())
    arrivals.arrived(arrival("waiting"), (), 0.0)
    assert arrivals.recent() == (*names[5:], "waiting")


def test_draining_is_news_once_and_stays() -> None:
    arrivals = new_arrivals()
    assert not arrivals.has_news
    arrivals.drain()
    assert arrivals.has_news
    assert arrivals.load(0.0, ()).is_draining
    arrivals.drain()
    assert not arrivals.has_news
    arrivals.settle(Load(num_running=1), 0.0, ())
    assert arrivals.load(0.0, ()).is_draining


def test_arrivals_are_told_of_in_the_engines_order_beside_its_own_queue() -> None:
    """Places are told as of now: what was said a second ago has grown older by that."""
    arrivals = new_arrivals()
    said = (
        QueuedPrompts("a", 2.0, 50.0, (0.1, 0.6), (300, 600), 1, 900),
        QueuedPrompts("c", 1.0, 0.0, (0.2,), (200,)),
    )
    arrivals.settle(Load(queued=said, step_time=PACE), 10.0, ())
    new = (("a", 400, 0.5), ("b", 50, 0.0))
    for tenant, num_tokens, waited_s in new:
        each = Arrival(RequestId(tenant), num_tokens, (), 4, tenant=tenant, share=2.0, waited_s=waited_s)
        arrivals.arrived(each, (), 11.0)
    a, c, b = arrivals.load(11.0, ()).queued
    assert (a.tenant, a.share, a.had, a.tokens) == ("a", 2.0, 50.0, (300, 400, 600))
    assert (a.num_more, a.more_tokens) == (1, 900)
    assert a.places == pytest.approx((0.1 - AGING, 0.4 - 0.5 * AGING, 0.6 - AGING))
    assert (c.tenant, c.tokens, b.tenant, b.tokens) == ("c", (200,), "b", (50,))
    assert b.places == pytest.approx((0.05,))
    arrivals.settle(Load(queued=said), 12.0, ())
    arrivals.refused(RequestId("a"))
    arrivals.refused(RequestId("b"))
    for of, before in zip(arrivals.load(12.0, ()).queued, said, strict=True):
        assert of.places == pytest.approx(before.places)
        assert msgspec.structs.replace(of, places=()) == msgspec.structs.replace(before, places=())


def test_an_account_that_is_late_leaves_nobody_at_the_door_out() -> None:
    """The batch that ends a step is made before the engine looks at its inbox."""
    arrivals = new_arrivals()
    arrivals.arrived(arrival("told", 10), (), 0.0)
    arrivals.take_unnamed()
    arrivals.arrived(arrival("new", 7), (), 0.0)
    ends = Load(queued_uncached_tokens=100, num_running=1, free_blocks=5, admitted=rid("before"))
    arrivals.settle(ends, 1.0, ())
    load = arrivals.beside(1.0)
    assert (load.queued_uncached_tokens, load.num_waiting, load.num_running) == (117, 2, 1)
    assert load.free_blocks == 5
    assert load.admitted == rid("before", "new")
    assert not arrivals.has_news
    begins = Load(queued_uncached_tokens=117, num_waiting=2, num_running=1, admitted=rid("told", "new"))
    arrivals.settle(begins, 1.0, ())
    assert arrivals.beside(1.0) is begins


def test_an_account_that_is_late_does_not_take_a_drain_back() -> None:
    arrivals = new_arrivals()
    arrivals.drain()
    for _ in range(2):
        arrivals.settle(Load(num_running=1), 0.0, ())
        assert arrivals.beside(0.0) == Load(num_running=1, is_draining=True)
        assert not arrivals.has_news
    said = Load(num_running=1, is_draining=True)
    arrivals.settle(said, 0.0, ())
    assert arrivals.beside(0.0) is said


def test_an_account_names_no_more_than_a_reader_takes() -> None:
    """The rest are told of next."""
    arrivals = new_arrivals()
    for name in ("a", "b", "c"):
        arrivals.arrived(arrival(name), (), 0.0)
    full = Load(admitted=rid(*map(str, range(MAX_ADMITTED_PER_BATCH - 2))))
    arrivals.settle(full, 0.0, ())
    assert arrivals.beside(0.0).admitted[-2:] == rid("a", "b")
    assert arrivals.take_unnamed() == rid("c")


ACTS = ["arrives", "taken in", "step begins", "step ends", "update", "ends", "refused"]


@given(st.lists(st.sampled_from(ACTS), max_size=40))
def test_whoever_was_named_is_counted_until_it_is_over(acts: list[str]) -> None:
    """A router drops what it booked for a request that is named: from then on every account counts it."""
    arrivals, named, over = new_arrivals(), set[str](), set[str]()
    door: list[RequestId] = []  # posted to the engine, which has not looked yet
    inside: list[RequestId] = []  # of the engine
    unnamed: list[RequestId] = []  # by the engine itself
    number = 0
    for act in acts:
        told: Load | None = None
        if act == "arrives":
            number += 1
            door.append(RequestId(f"r{number}"))
            arrivals.arrived(arrival(door[-1]), (), 0.0)
        elif act == "taken in":
            inside += door
            unnamed += door
            door.clear()
        elif act in ("step begins", "step ends"):  # of whom it has taken in, the others being at its door
            said = Load(num_waiting=len(inside), admitted=tuple(unnamed))
            unnamed.clear()
            arrivals.settle(said, 0.0, ())
            told = arrivals.beside(0.0)
        elif act == "update":
            told = arrivals.load(0.0, arrivals.take_unnamed())
        elif act == "ends" and inside:
            over.add(inside.pop(0))
        elif act == "refused" and door:
            over.add(door[0])
            arrivals.refused(door.pop(0))
        if told is not None:
            named |= set(told.admitted)
            assert told.num_waiting >= len(named - over)
            assert told.num_waiting <= number


def test_where_nobody_stands_back_sums_are_enough() -> None:
    arrivals = Arrivals(SchedulingOrder.FIRST_COME, 512)
    arrivals.settle(Load(queued=(QueuedPrompts("", 1.0, 0.0, num_more=2, more_tokens=70),)), 0.0, ())
    arrivals.arrived(arrival("a", 10), (), 0.0)
    assert arrivals.load(1.0, ()).queued == (QueuedPrompts("", 1.0, 0.0, num_more=3, more_tokens=80),)
