"""A hot prefix's next copy, ordered beside the request that would have made it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.types import HashHint, ReplicaId, RequestId
from router.placement.copy_orders import BARRED_S
from router.placement.decision import DecisionRecord, Placement, RouteQuery
from router.placement.observer import SilentObserver
from router.placement.routing import RouteReason
from router.policies import PolicyRequest
from router.pricing.cost import RequestShape
from tests.fakes.router import BLOCK_SIZE, chain, info, query, replica_id
from tests.fakes.routing import RoutingBench

A, B, C = map(replica_id, range(3))
SYSTEM = chain("system", 64)
SYSTEM_TOKENS = 64 * BLOCK_SIZE
BUSY = 500  # prompt tokens that wait at the holder: 60 ms, where the prefix takes 120


def ask(name: str) -> RouteQuery:
    """Something new behind the system prompt."""
    return RouteQuery(
        RequestId(name), chain(name, 1, SYSTEM), SYSTEM_TOKENS + BLOCK_SIZE + 1, cache_salt="salt"
    )


class Bench(RoutingBench):
    """A holds a hot prefix. `copies`: what was ordered."""

    def __init__(self, num_replicas: int = 2, *, has_maker: bool = True, **settings: object) -> None:
        super().__init__(num_replicas, **settings)
        self.copies: list[tuple[RouteQuery, Placement]] = []
        self.say(A, stored=SYSTEM)
        for index in range(20):
            self.routing.release(self.routing.choose(ask(f"user{index}")).request_id)
            self.clock.advance(0.1)
        if has_maker:
            self.routing.make_copies(lambda wanted, placement: self.copies.append((wanted, placement)))

    def occupy(self, *replicas: ReplicaId, queued_tokens: int = BUSY) -> None:
        """So much waits at these, and nothing at the others."""
        for replica in self.infos:
            queued = queued_tokens if replica in replicas else 0
            self.say(replica, queued_uncached_tokens=queued, num_waiting=bool(queued))


def test_the_request_goes_to_the_holder_and_the_copy_where_it_would_have_been_made() -> None:
    bench = Bench()
    bench.occupy(A)
    placement = bench.routing.choose(ask("hot"))
    assert (placement.replica_id, placement.reason) == (A, RouteReason.PREFIX)
    [(wanted, copy)] = bench.copies
    assert copy.ranks == (B,)
    assert list(wanted.block_hashes) == list(copy.block_hashes) == SYSTEM
    assert wanted.num_prompt_tokens == SYSTEM_TOKENS
    assert wanted.cache_salt == "salt"
    assert wanted.request_id != placement.request_id
    record = bench.records[-1]
    assert record.hot_copy == (B, SYSTEM_TOKENS)


def test_what_is_ordered_is_expected_there_and_counts_as_its_work_until_it_is_over() -> None:
    bench = Bench()
    bench.occupy(A)
    bench.routing.choose(ask("first"))
    [(wanted, _)] = bench.copies
    assert bench.in_flight(B) == 1
    second = bench.routing.choose(ask("second"))
    assert len(bench.copies) == 1, "it was ordered twice"
    assert second.overlap_blocks == len(SYSTEM), "wherever it goes, the prefix is there or on its way"
    assert bench.routing.release(wanted.request_id)
    assert bench.in_flight(B) == (second.replica_id == B)
    assert B not in bench.routing._index.match(_hints(SYSTEM)), "what was not made is expected no more"


def test_what_was_made_is_known_until_the_engine_tells_of_it() -> None:
    bench = Bench()
    bench.occupy(A)
    bench.routing.choose(ask("first"))
    [(wanted, _)] = bench.copies
    bench.routing.routed(wanted.request_id, B)
    bench.routing.first_token(wanted.request_id, B, 0)
    bench.routing.release(wanted.request_id)
    assert bench.routing._index.match(_hints(SYSTEM))[B] == len(SYSTEM)


def test_where_one_has_failed_none_is_wanted_for_a_while() -> None:
    """The prefix stays as hot: each request with it would have it tried again."""
    bench = Bench()
    for index in range(20):
        bench.occupy(A)
        bench.routing.release(bench.routing.choose(ask(f"hot{index}")).request_id)
        for wanted, copy in bench.copies[index:]:
            bench.routing.copy_failed(wanted, copy.replica_id)
            bench.routing.release(wanted.request_id)
    assert len(bench.copies) == 1
    bench.clock.advance(BARRED_S)
    bench.occupy(A)
    bench.routing.choose(ask("later"))
    assert len(bench.copies) == 2


def test_another_prefix_is_copied_where_one_has_failed() -> None:
    bench = Bench()
    bench.occupy(A)
    bench.routing.choose(ask("hot"))
    [(wanted, _)] = bench.copies
    other = wanted._replace(block_hashes=chain("other", 64))
    bench.routing.release(wanted.request_id)
    bench.routing.copy_failed(other, B)
    bench.occupy(A)
    bench.routing.choose(ask("again"))
    assert len(bench.copies) == 2


@pytest.mark.parametrize(("priority", "of_the_copy"), [(-3, 0), (0, 0), (4, 4)])
def test_a_copy_is_as_urgent_as_any_other_work_at_the_most(priority: int, of_the_copy: int) -> None:
    """Its request may be urgent; those that it is for are others."""
    bench = Bench()
    bench.occupy(A)
    urgent = ask("hot")._replace(
        priority=priority, tenant="alice", share=2.0, asked_at=bench.clock.now - 20, n=3
    )
    bench.routing.choose(urgent)
    [(wanted, _)] = bench.copies
    assert (wanted.priority, wanted.tenant, wanted.share) == (of_the_copy, "alice", 2.0)
    assert (wanted.asked_at, wanted.n, wanted.max_tokens) == (None, 1, 1)


def test_a_copy_that_lets_others_go_first_makes_no_replica_late() -> None:
    """Another Router's short prompts are computed before it, which this one has not heard of."""
    bench = Bench(3)
    bench.occupy(A, C)
    request = bench.routing.choose(ask("hot"))
    [(wanted, _)] = bench.copies
    bench.routing.routed(wanted.request_id, B)
    bench.routing.first_token(request.request_id, request.replica_id, 0)
    bench.routing.release(request.request_id)
    for step in range(100):
        bench.clock.advance(0.05)
        for replica in bench.infos:
            bench.say(replica, num_running=replica == B)
        decision = bench.routing.weigh(query(f"cold{step}", 1))
    [at_b] = [state for state in decision.ranking.states if state.replica_id == B]
    assert at_b.backlog_s(bench.clock.now) < 0.2, "the copy itself takes 0.12 s"


def test_nobody_wants_copies_any_more() -> None:
    bench = Bench()
    bench.routing.make_copies(None)
    bench.occupy(A)
    assert bench.routing.choose(ask("hot")).replica_id == B
    assert not bench.copies


def test_a_request_that_is_sooner_with_a_copy_of_its_own_makes_it() -> None:
    """Nobody waits for seconds so that a copy is made beside it."""
    bench = Bench()
    bench.occupy(A, queued_tokens=20_000)
    assert bench.routing.choose(ask("hot")).replica_id == B
    assert not bench.copies


@pytest.mark.parametrize("bench", [Bench(has_maker=False), Bench(policy_options={"copies_beside": False})])
def test_without_copies_beside_it_the_request_makes_it(bench: Bench) -> None:
    bench.occupy(A)
    assert bench.routing.choose(ask("hot")).replica_id == B
    assert not bench.copies


def test_no_copy_is_ordered_of_what_is_not_hot() -> None:
    bench = Bench()
    rare = chain("rare", 64)
    bench.say(A, stored=rare)
    bench.occupy(A)
    assert bench.routing.choose(query("rare", 64)).replica_id == A
    assert not bench.copies


def test_nobody_who_watches_requests_hears_of_copies_and_they_are_no_use_of_the_prefix() -> None:
    bench = Bench()
    bench.occupy(A)
    decisions_before, records_before = dict(bench.routing.statistics().decisions), len(bench.records)
    bench.routing.choose(ask("hot"))
    [(wanted, _)] = bench.copies
    bench.routing.routed(wanted.request_id, B)
    bench.routing.first_token(wanted.request_id, B, 0)
    bench.routing.release(wanted.request_id)
    assert [record.request_id for record in bench.records[records_before:]] == ["hot"]
    decisions = bench.routing.statistics().decisions
    assert sum(decisions.values()) == sum(decisions_before.values()) + 1
    shape = bench.routing.weigh(ask("next")).request.shape
    assert round(3 / shape.hot_share) == 21, "of A, B and one more: twenty users' uses and this one's"


class _Watcher(SilentObserver):
    """Who was told of at all."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self.told.add(record.request_id)

    def moved(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self.told.add(request.request_id)

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        self.told.add(request_id)


def test_no_step_of_a_copy_is_told_and_none_is_a_stay() -> None:
    bench = Bench(3)
    watcher = _Watcher()
    bench.routing.watch(watcher)
    bench.occupy(A)
    bench.routing.choose(ask("hot"))
    [(wanted, copy)] = bench.copies
    other = C if copy.replica_id == B else B
    bench.routing.routed(wanted.request_id, other)  # Serve found the first one gone
    bench.routing.first_token(wanted.request_id, other, 0)
    bench.clock.advance(7.0)
    bench.routing.release(wanted.request_id)
    assert watcher.told == {"hot"}
    assert bench.routing._loads.residence.mean_s == 0.0


def test_what_was_let_in_before_is_no_newcomer_to_the_fleet() -> None:
    """Neither a copy nor another attempt came and found, or did not find, a replica free."""
    bench = Bench()
    came: list[float] = []
    bench.routing._shaper.arrived = came.append  # type: ignore[method-assign]
    bench.occupy(A)
    bench.routing.choose(ask("hot"))
    bench.routing.choose(ask("hot")._replace(is_again=True))
    assert bench.copies
    assert len(came) == 1


def test_no_copy_is_made_where_nobody_knows_what_is_cached() -> None:
    """The replica keeps no prefixes: each request would have it computed there again."""
    bench = Bench()
    bench.infos[C] = info(has_prefix_cache=False)
    bench.routing.update_replicas(bench.infos)
    bench.occupy(A, B)
    bench.routing.choose(ask("hot"))
    assert not bench.copies


def test_several_replicas_get_copies_one_after_the_other() -> None:
    bench = Bench(3)
    for index in range(3):
        bench.occupy(A)
        bench.routing.choose(ask(f"hot{index}"))
        for wanted, copy in bench.copies[index:]:
            bench.routing.routed(wanted.request_id, copy.replica_id)
            bench.routing.first_token(wanted.request_id, copy.replica_id, 0)
            bench.routing.release(wanted.request_id)
            bench.occupy(A, copy.replica_id)
    assert {copy.replica_id for _, copy in bench.copies} <= {B, C}
    assert len({copy.replica_id for _, copy in bench.copies}) == len(bench.copies)


def test_a_replica_that_tells_no_blocks_keeps_none_of_a_copys_account() -> None:
    """Of a request it is remembered who computed for it until its answer is known; a copy has none."""
    bench = Bench()
    bench.infos[C] = info(has_kv_events=False)
    bench.routing.update_replicas(bench.infos)
    bench.occupy(A, B)
    bench.routing.choose(ask("hot"))
    [(wanted, _)] = bench.copies
    bench.routing.routed(wanted.request_id, C)
    bench.routing.first_token(wanted.request_id, C, 0)
    bench.routing.release(wanted.request_id)
    assert wanted.request_id not in bench.routing._index._served_by
    assert bench.routing._index.match(_hints(SYSTEM))[C] == len(SYSTEM)


@given(queued=st.lists(st.integers(0, 4000), min_size=3, max_size=3))
def test_whoever_waits_for_a_copy_was_soonest_so(queued: Sequence[int]) -> None:
    """However busy replicas are: what later requests gain sends no request where it waits longer."""
    bench = Bench(3)
    for replica, tokens in zip(bench.infos, queued, strict=True):
        bench.say(replica, queued_uncached_tokens=tokens, num_waiting=bool(tokens))
    decision = bench.routing.weigh(ask("hot"))
    shape: RequestShape = decision.request.shape
    chosen = decision.ranking.best
    if decision.hot_copy is None:
        return
    assert shape.hot_share == 1.0
    assert decision.ranking.cached_by(chosen.replica_id) >= SYSTEM_TOKENS
    assert decision.ranking.cached_by(decision.hot_copy.replica_id) < SYSTEM_TOKENS
    costs = [cost for cost in decision.ranking.costs if cost is not None]
    assert decision.ranking.costs[decision.ranking.order[0]] == pytest.approx(min(costs), rel=0.001)


def _hints(hashes: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(each[:8], "little") for each in hashes]
