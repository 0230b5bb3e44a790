"""One behaviour suite for every policy, then what is each one's own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cache.errors import ConfigError
from cache.types import ReplicaId, RequestId
from router.cost import Candidate, RequestShape
from router.policies import NAMES, Policy, PolicyRequest, make_policy
from router.routing import Routing
from tests.fakes_router import FakeClock, config, context, info, load, query, replica_id, view

SHAPE = RequestShape(1000)
REQUEST = PolicyRequest(RequestId("r"), SHAPE)


def candidate(name: str, cached: int = 0, **changes: object) -> Candidate:
    return Candidate(ReplicaId(name), view(**changes), cached, True)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param, context=context(seed=7))


# --- every policy ------------------------------------------------------------------------------


def test_every_candidate_is_ranked_exactly_once(policy: Policy) -> None:
    rng = random.Random(3)
    for count in range(1, 20):
        candidates = [
            candidate(f"r{i}", rng.randrange(900), backlog_s=rng.random(), last_chosen=rng.randrange(50))
            for i in range(count)
        ]
        before = list(candidates)
        ranked = policy.rank(candidates, REQUEST)
        assert Counter(scored.candidate for scored in ranked) == Counter(candidates)
        assert candidates == before


def test_one_candidate_is_the_choice(policy: Policy) -> None:
    only = candidate("only", backlog_s=1e6, num_requests=1000)
    assert [scored.replica_id for scored in policy.rank([only], REQUEST)] == ["only"]


def test_uncalibrated_replicas_can_be_ranked(policy: Policy) -> None:
    ranked = policy.rank([candidate("a", step_time=None), candidate("b", step_time=None)], REQUEST)
    assert {scored.replica_id for scored in ranked} == {"a", "b"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("is_measured", [True, False])
def test_cold_prompts_one_after_another_spread_evenly(
    name: str, num_replicas: int, is_measured: bool
) -> None:
    """No pile-up on the first replica, though every one is idle whenever the next prompt comes."""
    clock = FakeClock()
    routing = Routing(config(policy=name), clock=clock)
    routing.update_replicas({replica_id(i): info() for i in range(num_replicas)})
    counts: Counter[ReplicaId] = Counter()
    for index in range(40 * num_replicas):
        for i in range(num_replicas):
            routing.on_load(replica_id(i), load() if is_measured else load(step_time=None))
        placement = routing.choose(query(f"cold{index}"))
        counts[placement.replica_id] += 1
        routing.release(placement.request_id)
        clock.advance(1.0)
    assert min(counts.values()) >= 32
    assert max(counts.values()) <= 48


@pytest.mark.parametrize("name", NAMES)
def test_a_burst_of_cold_prompts_spreads(name: str) -> None:
    """Nothing is released and nothing reported in between: reservations alone must do it."""
    routing = Routing(config(policy=name), clock=FakeClock())
    routing.update_replicas({replica_id(i): info() for i in range(4)})
    counts = Counter(routing.choose(query(f"burst{i}")).replica_id for i in range(64))
    assert set(counts.values()) == {16}


# --- each one's own -----------------------------------------------------------------------------


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="expected_time, round_robin"):
        make_policy("fastest", context=context())


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    policy = make_policy("round_robin", context=context())
    assert not policy.uses_prefix
    ranked = policy.rank([candidate("a", 900, last_chosen=5), candidate("b", last_chosen=4)], REQUEST)
    assert [scored.replica_id for scored in ranked] == ["b", "a"]


def expected_time(seed: int = 0) -> Policy:
    return make_policy("expected_time", context=context(seed=seed))


def test_expected_time_prefers_the_holder() -> None:
    ranked = expected_time().rank([candidate("a"), candidate("b", 900), candidate("c", 500)], REQUEST)
    assert [scored.replica_id for scored in ranked] == ["b", "c", "a"]


def test_near_ties_go_to_the_less_loaded() -> None:
    near = [candidate("a", backlog_s=0.010, num_requests=5), candidate("b", backlog_s=0.011, num_requests=1)]
    assert expected_time().rank(near, REQUEST)[0].replica_id == "b"


def test_near_ties_never_give_up_a_longer_match() -> None:
    """8 tokens to compute against 24: near enough in seconds to be a tie, but a copy for nothing."""
    ties = [candidate("holder", 992, num_requests=3), candidate("other", 976, num_requests=0)]
    for seed in range(20):
        policy = make_policy("expected_time", {"near_tie": 0.5}, context=context(seed=seed))
        assert policy.rank(ties, REQUEST)[0].replica_id == "holder"


def test_ties_are_drawn_so_that_routers_with_the_same_view_do_not_herd() -> None:
    same = [candidate(f"r{i}") for i in range(16)]
    picks = Counter(expected_time(seed).rank(same, REQUEST)[0].replica_id for seed in range(400))
    assert len(picks) >= 15
    assert max(picks.values()) < 80
