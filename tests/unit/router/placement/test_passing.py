"""Sent at once to engines where longer prompts stand back: what a request meets there, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId
from router.placement.decision import Decision, Placement, RouteQuery
from router.placement.passing import Passing
from router.placement.placing import PromptPlacer, make_placer
from router.placement.routing import Routing
from router.placement.sent_prompts import SentPrompts
from router.pricing.cost import prefill_s
from tests.fakes.router import BLOCK_SIZE, STEP_TIME, FakeClock, chain, config, info, load, query, replica_id
from tests.fakes.routing import RoutingBench

A, B = replica_id(0), replica_id(1)
SHORTEST = SchedulingOrder.SHORTEST_PREEMPTING
STEP_S = STEP_TIME.base_s + STEP_TIME.per_sequence_s + 512 * STEP_TIME.per_token_s  # of a prompt alone
LONG, SHORT = 320, 31  # blocks: ten steps, and one


class Sending(RoutingBench):
    """A Router that sends at once to replicas of that order, told of all it sends."""

    def __init__(self, num_replicas: int = 1, order: SchedulingOrder = SHORTEST) -> None:
        super().__init__(num_replicas, binding="at_once", max_wait_s=None)
        self.routing.update_replicas({})
        self.infos = {replica_id(i): info(scheduling_order=order) for i in range(num_replicas)}
        self.routing.update_replicas(self.infos)
        sent = SentPrompts()
        self.routing.watch(sent)
        self.passing = Passing(sent)
        for replica in self.infos:
            self.say(replica)

    def send(self, name: str, num_blocks: int, **changes: Any) -> Placement:
        return self.routing.book(self.weigh(query(name, num_blocks, **changes)))

    def weigh(self, asked: RouteQuery) -> Decision:
        return self.routing.weigh(asked, passing=self.passing)

    def queued(self, replica: ReplicaId, num_blocks: int, **changes: Any) -> None:
        """It says that so much is queued there."""
        self.say(replica, queued_uncached_tokens=num_blocks * BLOCK_SIZE, **changes)


def met(fleet: Sending, num_blocks: int, **changes: Any) -> tuple[float, float]:
    """What that request waits for there, in steps of a prompt alone, and how many wait for it."""
    decision = fleet.weigh(query("asks", num_blocks, **changes))
    price = decision.ranking.best.price
    assert price is not None
    return decision.start_s / STEP_S, price.passed_s / decision.prefill_s


def behind_a_long_one(order: SchedulingOrder = SHORTEST, **engine: Any) -> Sending:
    fleet = Sending(order=order)
    fleet.send("long", LONG)
    fleet.queued(A, LONG, admitted=("long",), num_waiting=1, **engine)
    return fleet


def test_a_shorter_prompt_waits_for_half_a_step_and_is_waited_for() -> None:
    assert met(behind_a_long_one(), SHORT) == pytest.approx((0.5, 1.0))


def test_a_longer_prompt_waits_for_all_of_it_and_passes_nobody() -> None:
    assert met(behind_a_long_one(), LONG + 1) == pytest.approx((10.0, 0.0))


@pytest.mark.parametrize("order", [SchedulingOrder.FIRST_COME, SchedulingOrder.SHORTEST])
def test_where_nobody_stands_back_all_of_it_is_before_whoever_comes(order: SchedulingOrder) -> None:
    assert met(behind_a_long_one(order), SHORT) == pytest.approx((10.0, 0.0))


def test_what_is_shorter_is_before_it_and_what_is_longer_waits_for_it() -> None:
    fleet = behind_a_long_one()
    fleet.send("short", SHORT)
    fleet.send("shorter", SHORT // 2)
    before, passed = met(fleet, 2 * SHORT)
    assert before == pytest.approx(1.5, rel=0.05), "the two, as their part of the tokens"
    assert passed == pytest.approx(1.0)


def test_who_has_waited_elsewhere_passes_less() -> None:
    """Ten seconds of waiting are worth one of prefill, as in the engine."""
    own_s = 11 * STEP_S  # of the long one, more or less
    fleet = behind_a_long_one()
    fleet.clock.advance(11.0 * own_s)
    fleet.queued(A, LONG, num_waiting=1)
    assert met(fleet, SHORT)[1] == 0.0, "the long one has grown old"
    assert met(fleet, SHORT, asked_at=fleet.clock.now - 11.0 * own_s)[1] == pytest.approx(1.0)


def test_nobody_gives_up_a_place() -> None:
    fleet = behind_a_long_one(num_running=64)
    before, passed = met(fleet, SHORT)
    assert before >= 10.0
    assert passed == 0.0


def test_of_other_routers_prompts_as_many_are_passed_as_of_its_own() -> None:
    """Two wait there, one is its own: another Router's is taken to be as long."""
    fleet = behind_a_long_one()
    fleet.queued(A, 2 * LONG, num_waiting=2)
    assert met(fleet, SHORT) == pytest.approx((0.5, 2.0))


def test_a_prefix_behind_a_long_prompt_is_used() -> None:
    """Two steps of prefill are less than ten of waiting, and more than half of one."""
    for order, expected in ((SchedulingOrder.FIRST_COME, B), (SHORTEST, A)):
        fleet = Sending(2, order=order)
        assert fleet.send("long", LONG, excluded=frozenset({B})).replica_id == A
        fleet.queued(A, LONG, num_waiting=1, admitted=("long",), stored=chain("chat", 2 * SHORT))
        assert fleet.send("chat", 2 * SHORT).replica_id == expected


@given(
    sent=st.lists(st.integers(1, 400), max_size=6),
    num_blocks=st.integers(1, 400),
    reported=st.integers(0, 1000),
)
def test_never_more_before_it_than_is_queued_and_nothing_passed_by_the_longest(
    sent: list[int], num_blocks: int, reported: int
) -> None:
    fleet = Sending()
    for index, blocks in enumerate(sent):
        fleet.send(f"q{index}", blocks)
    names = tuple(f"q{index}" for index in range(len(sent)))
    fleet.queued(A, reported, num_waiting=len(sent), admitted=names)
    asked = query("asks", num_blocks)
    plain, as_met = fleet.routing.weigh(asked), fleet.weigh(asked)
    assert 0.0 <= as_met.start_s <= plain.start_s + 1e-9
    price = as_met.ranking.best.price
    assert price is not None
    num_longer = sum(blocks > num_blocks for blocks in sent)
    if reported:
        own_s = prefill_s(price, asked.num_prompt_tokens, 0)
        assert price.passed_s <= num_longer * own_s + 1e-9
    if not num_longer:
        assert price.passed_s == 0.0


def test_the_placer_that_sends_at_once_decides_so() -> None:
    clock = FakeClock()
    settings = config(binding="at_once", max_wait_s=None)
    routing = Routing(settings, clock=clock)
    placer = make_placer(settings, routing, clock)
    assert isinstance(placer, PromptPlacer)
    routing.update_replicas({A: info(scheduling_order=SHORTEST)})
    routing.on_load(A, load())
    placer.place_now(query("long", LONG))
    routing.on_load(A, load(queued_uncached_tokens=LONG * BLOCK_SIZE, num_waiting=1, admitted=("long",)))
    asked = query("short", SHORT)
    placer.place_now(asked)
    price = routing.records()[-1].ranking.best.price
    assert price is not None
    assert price.passed_s == prefill_s(price, asked.num_prompt_tokens, 0) > 0.0
