"""Decisions that are kept to be explained: what they say, and what they are to the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter

import msgspec
import pytest

from cache.types import ReplicaId, RequestId
from router.insight.debug_view import MAX_CANDIDATES, RequestView, request_view
from router.insight.journal import Journal
from router.insight.kept_decision import kept
from router.placement.routing import RouteQuery, Routing
from router.policies.expected_time import ExpectedTimeOptions
from router.pricing.cost import MEMORY_PRESSURE_S, CostTerms, cost_terms
from router.pricing.replica_state import ReplicaState
from tests.fakes.router import BLOCK_SIZE, FakeClock, chain, config, info, load, query, replica_id
from tests.fakes.routing import RoutingBench

REPLICAS = [replica_id(index) for index in range(24)]


def test_it_says_of_its_candidates_what_the_decision_was_made_from() -> None:
    bench = RoutingBench(3)
    bench.say(replica_id(1), stored=chain("q", 8), num_running=3, queued_uncached_tokens=50, num_waiting=1)
    bench.routing.choose(query("before it"))  # which its engine has not named yet
    bench.routing.choose(query("q"))
    record = bench.records[-1]
    whole, most = kept(record, 3), kept(record, 2)
    assert (whole.replica_id, whole.num_candidates, whole.exact_tokens) == (record.replica_id, 3, 128)
    assert (most.candidates, most.num_candidates) == (whole.candidates[:2], 3)
    for candidate, index in zip(whole.candidates, record.ranking.order, strict=True):
        state, cached = record.ranking.states[index], record.ranking.cached[index]
        assert state.price is not None
        assert (candidate.replica_id, candidate.cached_tokens) == (state.replica_id, cached)
        assert (candidate.num_waiting, candidate.queued_tokens) == (state.num_waiting, state.queued_tokens)
        assert candidate.cost == record.ranking.costs[index]
        assert candidate.terms(record.shape, 7.0, 0.2) == cost_terms(
            state.price, cached, record.shape, 7.0, 0.2
        )


def test_nobodys_terms_are_known_before_its_speed() -> None:
    routing = Routing(config(), clock=FakeClock())
    journal = Journal(1, max_candidates=1, clock=FakeClock())
    routing.watch(journal)
    routing.update_replicas({replica_id(0): info()})
    routing.on_load(replica_id(0), load(step_time=None))
    routing.choose(query("q"))
    [entry] = journal.latest(1)
    [candidate] = entry.decision.candidates
    assert candidate.terms(entry.decision.shape, 0.0, 0.1) is None


class Traffic:
    """Every replica reports between two decisions, so that each decision is made from states of its own."""

    def __init__(self, *, num_kept: int) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(), clock=self.clock)
        if num_kept:
            self.routing.watch(Journal(num_kept, max_candidates=MAX_CANDIDATES, clock=self.clock))
        self.routing.update_replicas(dict.fromkeys(REPLICAS, info()))
        self.number = 0

    def goes_on(self, num_requests: int) -> Counter[type]:
        """What the garbage collector then walks in each collection, by type."""
        for _ in range(num_requests):
            for each in REPLICAS:
                self._says(each)
            self.number += 1
            name = RequestId(str(self.number))
            chosen = self.routing.choose(query("q", request_id=name)).replica_id
            self.routing.first_token(name, chosen, 0)
            self.routing.finish(name)
            self.clock.advance(0.1)
        gc.collect()
        return Counter(map(type, gc.get_objects()))

    def _says(self, replica: ReplicaId) -> None:
        self.routing.on_load(replica, load(num_running=self.number % 7, context_tokens=self.number))


def test_a_decision_that_is_over_keeps_no_replicas_state() -> None:
    traffic = Traffic(num_kept=0)
    first, last = traffic.goes_on(10), traffic.goes_on(100)
    assert last[ReplicaState] <= first[ReplicaState]  # other tests' included


def test_what_is_kept_to_be_explained_is_nothing_to_the_garbage_collector() -> None:
    """Two objects an entry, its list and its shape; with whole decisions it was dozens."""
    traffic = Traffic(num_kept=200)
    first = traffic.goes_on(10)
    grown = traffic.goes_on(100) - first
    assert not {ReplicaState, type(load())} & grown.keys()
    assert grown.total() < 5 * 100, grown.most_common(5)


def shown(bench: RoutingBench) -> RequestView:
    """The latest decision, of at most three candidates."""
    journal = Journal(1, max_candidates=3, clock=bench.clock)
    journal.decided(bench.records[-1], query("q", request_id=bench.records[-1].request_id), ())
    [entry] = journal.latest(1)
    return request_view(entry, block_size=BLOCK_SIZE, memory_pressure_s=MEMORY_PRESSURE_S)


def totals(view: RequestView) -> list[float]:
    """Of each candidate's terms."""
    found = []
    for candidate in view.candidates:
        assert candidate.terms is not None
        fields = msgspec.structs.asdict(candidate.terms)
        preference_s, total_s = fields.pop("preference_s"), fields.pop("total_s")
        assert total_s == pytest.approx(CostTerms(**fields).total_s + preference_s)
        found.append(total_s)
    return found


def test_terms_add_up_to_the_cost_where_a_replica_is_another_routers() -> None:
    bench = RoutingBench(2, peers=lambda: (0, 2))
    bench.routing.choose(query("cold"))
    view = shown(bench)
    assert totals(view) == [candidate.cost for candidate in view.candidates]
    ours, others = [candidate.terms for candidate in view.candidates]
    assert ours is not None
    assert others is not None
    assert ours.preference_s == 0.0
    assert others.preference_s == pytest.approx(ExpectedTimeOptions().own_share * others.prefill_s)
    assert view.heir is None


def test_terms_add_up_to_the_cost_where_an_heir_is_wanted() -> None:
    bench = RoutingBench(3)
    system = chain("system", 64)
    for number, turn in enumerate((bench.say, bench.say, bench.routing.replica_lost)):
        hashes = chain(f"user{number}", 1, system)
        bench.routing.choose(RouteQuery(RequestId(str(number)), hashes, 65 * BLOCK_SIZE + 1))
        turn(replica_id(0))
    bench.routing.choose(RouteQuery(RequestId("last"), chain("last", 1, system), 65 * BLOCK_SIZE + 1))
    view = shown(bench)
    assert view.heir == view.candidates[0].replica
    assert totals(view) == [candidate.cost for candidate in view.candidates]
    assert view.candidates[1].terms is not None
    assert view.candidates[1].terms.preference_s > 0.1


def test_other_policies_costs_are_no_totals() -> None:
    bench = RoutingBench(2, policy="least_outstanding")
    bench.routing.choose(query("q"))
    view = shown(bench)
    assert [candidate.cost for candidate in view.candidates] == [0.0, 0.0]
    assert min(totals(view)) > 0.0


def test_tokens_times_requests_are_no_totals() -> None:
    """One of three knows its speed, which speaks for nobody: all are compared without."""
    bench = RoutingBench(3)
    for each in (replica_id(1), replica_id(2)):
        bench.say(each, step_time=None)
    bench.routing.choose(query("q"))
    known = {candidate.replica: candidate for candidate in shown(bench).candidates}.pop(replica_id(0))
    assert known.cost == query("q").num_prompt_tokens
    assert known.terms is not None
    assert known.terms.total_s < 1.0
    assert known.terms.preference_s == 0.0
