"""A shadow decides about what the live policy saw, and nothing it does reaches a request."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.insight.debug_view import request_view
from router.insight.journal import Journal
from router.insight.shadow import Shadow, ShadowVerdict
from router.placement.routing import Routing
from router.policies import PolicyContext, PolicyRequest, Scored, StatelessPolicy, make_policy
from router.pricing.cost import Candidate
from tests.fakes.router import BLOCK_SIZE, FakeClock, config, info, load, query, replica_id

REPLICAS = [replica_id(index) for index in range(4)]


class Last(StatelessPolicy):
    """Picks the last candidate, and writes down what it is told."""

    name = "last"
    uses_prefix = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        return [Scored(candidate, None) for candidate in reversed(candidates)]

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self.told.append(f"+{replica_id}")

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self.told.append(f"-{replica_id}")

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self.told.append(f"{request.request_id} to {replica_id}")

    def finished(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:
        self.told.append(f"{request_id} over")


class Broken(Last):
    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        raise RuntimeError("a prompt may be quoted here")


def fleet(num_replicas: int = 4, *, seed: int = 7, num_routers: int = 1, **changes: Any) -> Routing:
    clock = FakeClock()
    routing = Routing(config(**changes), clock=clock, rng=random.Random(seed), peers=lambda: (0, num_routers))
    routing.update_replicas({each: info() for each in REPLICAS[:num_replicas]})
    for each in REPLICAS[:num_replicas]:
        routing.on_load(each, load())
    return routing


def shadow_of(routing: Routing, policy: Last, *, share: float = 1.0) -> tuple[Shadow, list[ShadowVerdict]]:
    shadow = Shadow(policy, share=share, rng=random.Random(1))
    verdicts: list[ShadowVerdict] = []
    shadow.listen(verdicts.append)
    routing.watch(shadow)
    return shadow, verdicts


def warm_fleet() -> tuple[Routing, ReplicaId]:
    """Of two, and the one that has computed a prompt."""
    routing = fleet(2)
    holder = routing.choose(query("warm", excluded=frozenset({REPLICAS[1]}))).replica_id
    routing.first_token(RequestId("warm"), holder, 0)
    routing.finish(RequestId("warm"))
    return routing, holder


def test_live_decisions_are_the_same_with_and_without_it() -> None:
    bare, watched = fleet(), fleet()
    context = PolicyContext(BLOCK_SIZE, FakeClock(), random.Random(3))
    watched.watch(Shadow(make_policy("expected_time", context=context), rng=random.Random(3)))
    names = [f"q{number}" for number in range(200)]
    ranks = [[routing.choose(query(name)).ranks for name in names] for routing in (bare, watched)]
    assert ranks[0] == ranks[1]


def test_its_memory_follows_where_requests_really_went() -> None:
    routing, policy = fleet(2), Last()
    shadow_of(routing, policy)
    placed = routing.choose(query("q")).replica_id
    [other] = {*REPLICAS[:2]} - {placed}
    routing.routed(RequestId("q"), other)
    routing.routed(RequestId("q"), other)
    routing.finish(RequestId("q"))
    routing.update_replicas({REPLICAS[0]: info()})
    assert policy.told == ["+r0", "+r1", f"q to {placed}", f"q to {other}", "q over", "-r1"]


def test_where_requests_really_went_is_not_where_it_would_have_sent_them() -> None:
    (routing, holder), policy = warm_fleet(), Last()
    _, verdicts = shadow_of(routing, policy)
    routing.choose(query("twin", block_hashes=query("warm").block_hashes))
    assert [verdict.replica_id for verdict in verdicts] == [REPLICAS[1]]
    assert f"twin to {holder}" in policy.told


def test_a_dearer_choice_is_priced_by_the_live_cost() -> None:
    """The live policy follows the prefix; the other replica would compute 128 tokens again."""
    (routing, holder), policy = warm_fleet(), Last()
    shadow, verdicts = shadow_of(routing, policy)
    twin = query("twin", block_hashes=query("warm").block_hashes)
    assert routing.choose(twin).replica_id == holder
    [verdict] = verdicts
    assert (verdict.replica_id, verdict.agrees) == (REPLICAS[1], False)
    assert verdict.cached_tokens == 0
    assert verdict.difference_s == pytest.approx(
        1.5 * 128 * 0.0001
    )  # computed, and charged for computing again
    assert shadow.totals.extra_s == verdict.difference_s
    totals = shadow.totals
    assert (totals.agreed, totals.disagreed, totals.priced, totals.saved_s) == (0, 1, 1, 0.0)


def test_the_difference_is_of_what_the_live_choice_went_by() -> None:
    """Of two Routers this one leaves the second replica to the other. It said: at the same cost."""
    routing = fleet(2, num_routers=2)
    journal = Journal(1, max_candidates=2, clock=FakeClock())
    routing.watch(journal)
    shadow, verdicts = shadow_of(routing, Last())
    assert routing.choose(query("q")).replica_id == REPLICAS[0]
    [verdict] = verdicts
    assert verdict.replica_id == REPLICAS[1]
    assert verdict.difference_s
    assert shadow.totals.extra_s == verdict.difference_s
    view = request_view(journal.latest(1)[0], block_size=BLOCK_SIZE, memory_pressure_s=0.15)
    ours, others = [candidate.terms for candidate in view.candidates]
    assert ours is not None
    assert others is not None
    assert verdict.difference_s == pytest.approx(others.total_s - ours.total_s)
    assert verdict.difference_s == pytest.approx(others.preference_s)


def test_beside_a_policy_without_seconds_the_default_costs_count() -> None:
    routing = fleet(2, num_routers=2, policy="round_robin")
    _, verdicts = shadow_of(routing, Last())
    while not verdicts or verdicts[-1].agrees:
        routing.choose(query(f"q{len(verdicts)}"))
    assert verdicts[-1].difference_s is not None


def test_a_choice_of_one_is_no_choice() -> None:
    routing = fleet(1)
    shadow, verdicts = shadow_of(routing, Last())
    routing.choose(query("q"))
    assert not verdicts
    assert shadow.totals.agreed == 0


def test_a_share_of_the_decisions_costs_a_share() -> None:
    routing = fleet()
    shadow, verdicts = shadow_of(routing, Last(), share=0.25)
    for number in range(400):
        routing.choose(query(f"q{number}"))
    assert 60 < len(verdicts) < 140
    assert shadow.totals.spent_s > 0


def test_a_broken_policy_is_switched_off_and_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    routing = fleet()
    shadow, verdicts = shadow_of(routing, Broken())
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            routing.choose(query(f"q{number}"))
    assert shadow.totals.failed
    assert not verdicts
    assert len(caplog.records) == 1
    assert "quoted" not in caplog.text


def test_unknown_speeds_have_no_difference() -> None:
    routing = Routing(config(), clock=FakeClock())
    routing.update_replicas({each: info() for each in REPLICAS})
    _, verdicts = shadow_of(routing, Last())
    for number in range(10):
        routing.choose(query(f"q{number}"))
    assert {verdict.difference_s for verdict in verdicts} <= {0.0, None}
    assert any(verdict.difference_s is None for verdict in verdicts)
