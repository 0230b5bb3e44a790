"""What a request meets at engines where longer prompts stand back, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId
from router.placement.decision import RouteQuery
from router.pricing.replica_state import ReplicaState
from tests.fakes.router import BLOCK_SIZE, STEP_TIME, chain, info, query, replica_id
from tests.fakes.routing import RoutingBench

A, B = replica_id(0), replica_id(1)
SHORTEST = SchedulingOrder.SHORTEST_PREEMPTING
STEP_S = STEP_TIME.base_s + STEP_TIME.per_sequence_s + 512 * STEP_TIME.per_token_s  # of a prompt alone
LONG, SHORT = 320, 31  # blocks: ten steps, and one


class Fleet(RoutingBench):
    """A Router of replicas of that order."""

    def __init__(self, num_replicas: int = 1, order: SchedulingOrder = SHORTEST) -> None:
        super().__init__(num_replicas)
        self.routing.update_replicas({})
        self.infos = {replica_id(i): info(scheduling_order=order) for i in range(num_replicas)}
        self.routing.update_replicas(self.infos)
        for replica in self.infos:
            self.say(replica)

    def send(self, name: str, num_blocks: int, **changes: Any) -> ReplicaId:
        return self.routing.choose(query(name, num_blocks, **changes)).replica_id

    def queued(self, replica: ReplicaId, num_blocks: int, **changes: Any) -> None:
        """It says that so much is queued there."""
        self.say(replica, queued_uncached_tokens=num_blocks * BLOCK_SIZE, **changes)


def before_s(state: ReplicaState, now: float) -> float:
    """What of its work goes before the request that it is priced for."""
    assert state.price is not None
    return state.price.busy_until - now


def met(fleet: Fleet, num_blocks: int, **changes: Any) -> tuple[float, float]:
    """What that request waits for there, in steps of a prompt alone, and how many wait for it."""
    decision = fleet.routing.weigh(query("asks", num_blocks, **changes))
    best, now = decision.ranking.best, fleet.clock.now
    assert best.price is not None
    assert decision.start_s == best.backlog_s(now) >= before_s(best, now), "all of it stays known"
    return before_s(best, now) / STEP_S, best.price.passed_s / decision.prefill_s


def behind_a_long_one(order: SchedulingOrder = SHORTEST, **engine: Any) -> Fleet:
    fleet = Fleet(order=order)
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


@given(num_running=st.integers(1, 60), longer=st.integers(0, 4), stay_s=st.sampled_from([0.5, 10.0]))
def test_without_a_free_block_more_that_waits_makes_it_no_more_attractive(
    num_running: int, longer: int, stay_s: float
) -> None:
    """Whoever goes first there waits until somebody ends: no prompt that stands back gives up what runs."""
    full = {"num_running": num_running, "free_blocks": 0, "context_tokens": 100}
    costs = list[float]()
    for count in range(longer + 1):
        fleet = Fleet()
        fleet.routing._loads.residence.observe(stay_s)
        names = tuple(f"long{index}" for index in range(count))
        for name in names:
            fleet.send(name, LONG)
        fleet.queued(A, count * LONG, admitted=names, num_waiting=count, **full)
        ranking = fleet.routing.weigh(query("asks", SHORT)).ranking
        assert before_s(ranking.best, fleet.clock.now) >= stay_s / num_running * (1.0 - 1e-9)
        costs.append(ranking.costs[0] or 0.0)
    assert costs == sorted(costs)


def test_of_other_routers_prompts_as_many_are_passed_as_of_its_own() -> None:
    """Two wait there, one is its own: another Router's is taken to be as long."""
    fleet = behind_a_long_one()
    fleet.queued(A, 2 * LONG, num_waiting=2)
    assert met(fleet, SHORT) == pytest.approx((0.5, 2.0))


def test_a_prefix_behind_a_long_prompt_is_used() -> None:
    """Two steps of prefill are less than ten of waiting, and more than half of one."""
    for order, expected in ((SchedulingOrder.FIRST_COME, B), (SHORTEST, A)):
        fleet = Fleet(2, order=order)
        assert fleet.send("long", LONG, excluded=frozenset({B})) == A
        fleet.queued(A, LONG, num_waiting=1, admitted=("long",), stored=chain("chat", 2 * SHORT))
        assert fleet.send("chat", 2 * SHORT) == expected


def sharing(name: str, num_blocks: int, with_long: int) -> RouteQuery:
    """A prompt that begins as the long one does, with so many of its blocks."""
    return query(
        name, block_hashes=chain(name, num_blocks - with_long, chain("long", LONG)[:with_long])
    )._replace(num_prompt_tokens=num_blocks * BLOCK_SIZE + 1)


def test_who_is_to_find_what_nobody_has_computed_yet_comes_after_whoever_is_to() -> None:
    """As in the engine: a twin is not short before its twin is there, and passes nobody by that."""
    fleet = behind_a_long_one()
    twin = sharing("twin", SHORT, SHORT - 2)
    decision = fleet.routing.weigh(twin)
    price = decision.ranking.best.price
    assert decision.ranking.best_cached == (SHORT - 2) * BLOCK_SIZE
    assert price is not None
    assert price.passed_s == 0.0
    assert before_s(decision.ranking.best, fleet.clock.now) == pytest.approx(10.0 * STEP_S)
    fleet.queued(A, LONG, num_waiting=1, stored=chain("long", SHORT - 2))
    assert met(fleet, SHORT) == pytest.approx((0.5, 1.0))
    decision = fleet.routing.weigh(twin)
    price = decision.ranking.best.price
    assert price is not None
    assert price.passed_s == pytest.approx(decision.prefill_s), "it is there"


def test_what_is_shared_with_a_long_prompt_is_computed_where_nobody_waits_before_it() -> None:
    """One step for what the long one would have left after ten."""
    fleet = Fleet(2)
    assert fleet.send("long", LONG, excluded=frozenset({B})) == A
    assert fleet.routing.choose(sharing("twin", SHORT, SHORT - 2)).replica_id == B


def test_a_more_urgent_one_does_not_wait_for_a_prefix_of_a_less_urgent_one() -> None:
    fleet = behind_a_long_one()
    decision = fleet.routing.weigh(sharing("twin", SHORT, SHORT - 2)._replace(priority=-1))
    assert before_s(decision.ranking.best, fleet.clock.now) == pytest.approx(0.5 * STEP_S)


def test_one_that_tells_nothing_of_its_cache_is_taken_to_hold_what_it_held() -> None:
    fleet = Fleet(0)
    fleet.infos = {A: info(scheduling_order=SHORTEST, has_kv_events=False)}
    fleet.routing.update_replicas(fleet.infos)
    fleet.say(A)
    fleet.send("long", LONG)
    fleet.queued(A, LONG, admitted=("long",), num_waiting=1)
    decision = fleet.routing.weigh(sharing("twin", SHORT, SHORT - 2))
    assert decision.ranking.best_cached == (SHORT - 2) * BLOCK_SIZE
    assert decision.ranking.best.price is not None
    assert decision.ranking.best.price.passed_s > 0.0


def test_a_twin_of_a_twin_comes_after_both() -> None:
    fleet = behind_a_long_one()
    fleet.routing.choose(sharing("twin", SHORT, SHORT - 2))
    decision = fleet.routing.weigh(sharing("second", SHORT, SHORT - 2))
    assert decision.ranking.best.price is not None
    assert decision.ranking.best.price.passed_s == 0.0
    assert met(fleet, SHORT)[1] == pytest.approx(2.0), "and both wait for whoever is shorter"


def test_a_request_on_its_way_is_held_against_what_it_would_pass_as_well() -> None:
    """Whether another replica might be better by now is asked in the same prices."""
    fleet = Fleet(2)
    assert fleet.send("long", LONG, excluded=frozenset({B})) == A
    fleet.queued(A, LONG, num_waiting=1, admitted=("long",), stored=chain("chat", 2 * SHORT))
    fleet.queued(B, LONG, num_waiting=1)
    decision = fleet.routing.weigh(query("chat", 2 * SHORT))
    assert decision.ranking.best.replica_id == A
    fleet.queued(B, 0)
    state = next(state for state in fleet.routing.free_replicas(0.0)[1] if state.replica_id == B)
    assert not fleet.routing.could_win(decision, [state])


@given(
    sent=st.lists(st.integers(1, 400), max_size=6),
    num_blocks=st.integers(1, 400),
    reported=st.integers(0, 1000),
)
def test_never_more_before_it_than_is_queued_and_nothing_waits_for_the_longest(
    sent: list[int], num_blocks: int, reported: int
) -> None:
    fleet = Fleet()
    for index, blocks in enumerate(sent):
        fleet.send(f"q{index}", blocks)
    names = tuple(f"q{index}" for index in range(len(sent)))
    fleet.queued(A, reported, num_waiting=len(sent), admitted=names)
    before, num_passed = met(fleet, num_blocks)
    num_longer = sum(blocks > num_blocks for blocks in sent)
    assert before >= 0.0
    if reported:
        assert 0.0 <= num_passed <= num_longer + 1e-9
    if not num_longer:
        assert num_passed == 0.0
