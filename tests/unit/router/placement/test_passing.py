"""What a request meets at engines where longer prompts stand back, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId
from router.placement.decision import RouteQuery
from router.pricing.replica_state import ReplicaState
from tests.fakes.router import BLOCK_SIZE, STEP_TIME, chain, info, query, replica_id, told
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

    def queued(self, replica: ReplicaId, *num_blocks: int, age_s: float = 0.0, **changes: Any) -> None:
        """It says that prompts of so many blocks are queued there, all of that age."""
        queue = (told(*num_blocks, age_s=age_s),) if num_blocks else ()
        tokens = sum(num_blocks) * BLOCK_SIZE
        said = {"num_waiting": len(num_blocks), "queued": queue, "queued_uncached_tokens": tokens}
        self.say(replica, **{**said, **changes})


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
    fleet.queued(A, LONG, admitted=("long",), **engine)
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
    fleet.queued(A, LONG, age_s=11.0 * own_s)
    assert met(fleet, SHORT)[1] == 0.0, "the long one has grown old"
    assert met(fleet, SHORT, asked_at=fleet.clock.now - 11.0 * own_s)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("num_running", [62, 63, 64])
def test_nobody_gives_up_a_place(num_running: int) -> None:
    """Of 64, one of which the long one will have."""
    before, passed = met(behind_a_long_one(num_running=num_running), SHORT)
    assert (before >= 10.0) is (num_running > 62)
    assert passed == (0.0 if num_running > 62 else pytest.approx(1.0))


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
        fleet.queued(A, *count * [LONG], admitted=names, **full)
        ranking = fleet.routing.weigh(query("asks", SHORT)).ranking
        assert before_s(ranking.best, fleet.clock.now) >= stay_s / num_running * (1.0 - 1e-9)
        costs.append(ranking.costs[0] or 0.0)
    assert costs == sorted(costs)


def test_other_routers_prompts_are_known_as_its_own_are() -> None:
    """Three wait there, one is its own: of the two others one is shorter."""
    fleet = behind_a_long_one()
    fleet.queued(A, LONG, LONG, SHORT // 2)
    before, num_passed = met(fleet, SHORT)
    assert before == pytest.approx(0.5)
    assert num_passed == 2.0
    assert met(fleet, LONG + 1)[1] == 0.0


def test_what_the_engine_has_not_named_is_on_top_of_what_it_says() -> None:
    fleet = behind_a_long_one()
    fleet.send("second", LONG)
    assert met(fleet, SHORT) == pytest.approx((0.5, 2.0))
    fleet.queued(A, LONG)
    assert met(fleet, SHORT)[1] == 2.0, "it does not know of it yet"
    fleet.queued(A, LONG, LONG, admitted=("second",))
    assert met(fleet, SHORT)[1] == 2.0, "it counts once"
    fleet.queued(A, LONG)
    assert met(fleet, SHORT)[1] == 1.0, "it has been computed"


def test_a_prefix_behind_a_long_prompt_is_used() -> None:
    """Two steps of prefill are less than ten of waiting, and more than half of one."""
    for order, expected in ((SchedulingOrder.FIRST_COME, B), (SHORTEST, A)):
        fleet = Fleet(2, order=order)
        assert fleet.send("long", LONG, excluded=frozenset({B})) == A
        fleet.queued(A, LONG, admitted=("long",), stored=chain("chat", 2 * SHORT))
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
    fleet.queued(A, LONG, stored=chain("long", SHORT - 2))
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
    fleet.queued(A, LONG, admitted=("long",))
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
    fleet.queued(A, LONG, admitted=("long",), stored=chain("chat", 2 * SHORT))
    fleet.queued(B, LONG)
    decision = fleet.routing.weigh(query("chat", 2 * SHORT))
    assert decision.ranking.best.replica_id == A
    fleet.queued(B)
    state = next(state for state in fleet.routing.free_replicas(0.0)[1] if state.replica_id == B)
    assert not fleet.routing.could_win(decision, [state])


@given(
    own=st.lists(st.integers(1, 400), max_size=4),
    others=st.lists(st.integers(1, 400), max_size=4),
    unnamed=st.lists(st.integers(1, 400), max_size=3),
    num_blocks=st.integers(1, 400),
)
def test_what_is_longer_is_passed_whoever_has_sent_it_and_what_is_shorter_is_before_it(
    own: list[int], others: list[int], unnamed: list[int], num_blocks: int
) -> None:
    queue = [*own, *others, *unnamed]
    assume(num_blocks not in queue)
    fleet = Fleet()
    for index, blocks in enumerate([*own, *unnamed]):
        fleet.send(f"q{index}", blocks)
    fleet.queued(A, *own, *others, admitted=tuple(f"q{index}" for index in range(len(own))))
    before, num_passed = met(fleet, num_blocks)
    assert num_passed == pytest.approx(sum(blocks > num_blocks for blocks in queue))
    shorter = sum(blocks * BLOCK_SIZE + 1 for blocks in queue if blocks < num_blocks)
    total = sum(blocks * BLOCK_SIZE + 1 for blocks in queue)
    behind_all, _ = met(fleet, 401)
    assert before >= min(behind_all, shorter / max(1, total) * behind_all) * (1.0 - 1e-9)
    assert before <= behind_all * (1.0 + 1e-9)
