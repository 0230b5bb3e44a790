"""The default policy among several routers: each has a share of the replicas for prompts nobody holds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cache.types import HashHint, ReplicaId
from router.policies import Heir, PolicyContext, make_policy
from router.policies.expected_time import HEIR_SHARE, ExpectedTime
from router.pricing.cost import Candidate, RequestShape, prefill_s, price_of
from tests.fakes.router import BLOCK_SIZE, FakeClock, info, replica_id, request, view

REPLICAS = [replica_id(i) for i in range(4)]
SHAPE = RequestShape(1000)


class Router:
    def __init__(self, place: int, num_routers: int, **options: object) -> None:
        self.peers = (place, num_routers)
        context = PolicyContext(BLOCK_SIZE, FakeClock(), random.Random(place), lambda: self.peers)
        policy = make_policy("expected_time", options, context=context)
        assert isinstance(policy, ExpectedTime)
        self.policy = policy
        for replica in REPLICAS:
            self.policy.replica_added(replica, info())

    def picks(self, **changes: object) -> Counter[ReplicaId]:
        """Where 100 prompts would go, all at the same state of the fleet."""
        candidates = [Candidate(r, view(**changes), 0, True) for r in REPLICAS]
        return Counter(self.policy.rank(candidates, request(SHAPE))[0].replica_id for _ in range(100))


@pytest.mark.parametrize("num_routers", [2, 4])
def test_cold_prompts_of_several_routers_go_to_different_replicas(num_routers: int) -> None:
    """None has heard of the others' last requests: without shares they would meet on the same replicas."""
    picks = [set(Router(place, num_routers).picks()) for place in range(num_routers)]
    assert sum(map(len, picks)) == len(set().union(*picks))


def test_a_router_alone_or_told_not_to_uses_all_of_them() -> None:
    assert set(Router(0, 1).picks()) == set(REPLICAS)
    assert set(Router(0, 2, own_share=0.0).picks()) == set(REPLICAS)


def test_more_routers_than_replicas_share_them_evenly() -> None:
    picks = Counter(next(iter(Router(place, 8).picks())) for place in range(8))
    assert picks == dict.fromkeys(REPLICAS, 2)


def test_a_share_is_a_preference_not_a_border() -> None:
    """Own replicas are left as soon as waiting there costs more than the preference."""
    router = Router(0, 2)
    own = set(router.picks())
    candidates = [Candidate(r, view(backlog_s=1.0 if r in own else 0.0), 0, True) for r in REPLICAS]
    assert router.policy.rank(candidates, request(SHAPE))[0].replica_id not in own


def test_a_prefix_is_followed_into_anybodys_share() -> None:
    router = Router(0, 2, own_share=0.5)
    other = next(r for r in REPLICAS if r not in router.picks())
    candidates = [Candidate(r, view(), 500 if r == other else 0, True) for r in REPLICAS]
    assert router.policy.rank(candidates, request(SHAPE))[0].replica_id == other


def test_shares_follow_membership_and_the_number_of_routers() -> None:
    one, other = Router(0, 2), Router(1, 2)
    for router in (one, other):
        router.policy.replica_removed(REPLICAS[0])
        assert REPLICAS[0] not in router.policy._others
    gone = view(is_full=True)
    candidates = [Candidate(r, gone if r == REPLICAS[0] else view(), 0, True) for r in REPLICAS[1:]]
    firsts = {one.policy.rank(candidates, request(SHAPE))[0].replica_id for _ in range(50)}
    others = {other.policy.rank(candidates, request(SHAPE))[0].replica_id for _ in range(50)}
    assert not firsts & others
    one.peers = (0, 1)
    assert {one.policy.rank(candidates, request(SHAPE))[0].replica_id for _ in range(100)} == set(
        REPLICAS[1:]
    )


def test_everybody_but_its_heir_is_dearer_by_what_there_is_to_compute_of_the_prefix() -> None:
    """Not by its own part of the prompt, which anybody may compute."""
    policy, load = Router(0, 1).policy, view()
    candidates = [Candidate(replica_id(i), load, cached, True) for i, cached in enumerate([0, 0, 64, 160])]
    asked = request(RequestShape(num_prompt_tokens=1000))
    inherited = asked._replace(heir=Heir(replica_id(0), prefix=HashHint(1), tokens=160))
    plain, found = (
        {scored.candidate.replica_id: scored.cost for scored in policy.rank(candidates, each)}
        for each in (asked, inherited)
    )
    price = price_of(load)
    assert price is not None
    for candidate in candidates:
        name, share = candidate.replica_id, 0.0 if candidate.replica_id == replica_id(0) else HEIR_SHARE
        dearer = share * prefill_s(price, 160, candidate.cached_tokens)
        assert found[name] == pytest.approx(plain[name] + dearer)
    assert found[replica_id(3)] == plain[replica_id(3)], "it holds it"
