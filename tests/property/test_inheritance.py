"""A replica leaves: each of its hot prefixes gets one new home, however many ask at once, and of whomever."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block_hash import hints as to_hints
from cache.events import FORMAT_VERSION, Digest, EventBatch
from cache.types import BlockHash, HashHint, ReplicaId
from router.insight.shadow import Shadow
from router.placement.decision import RouteQuery
from router.placement.inheritance import SETTLES_S, heir
from router.placement.routing import Routing
from router.policies import PolicyContext, make_policy
from tests.fakes.router import BLOCK_SIZE, FakeClock, chain, config, info, load, query, replica_id

PREFIX_BLOCKS = 64  # 1024 tokens
LEAVER = replica_id(0)


class Fleet:
    """Several Routers over the same replicas on paper; each hears what replicas say, none of the others."""

    def __init__(self, num_replicas: int, num_routers: int) -> None:
        self.clock = FakeClock()
        self.infos = {replica_id(index): info() for index in range(num_replicas)}
        self.seq = 0
        self.num_asked = 0
        self.routers = []
        for place in range(num_routers):
            peers = (place, num_routers)
            routing = Routing(
                config(seed=place, silent_after_s=3600.0), clock=self.clock, peers=lambda peers=peers: peers
            )  # type: ignore[misc]
            routing.update_replicas(self.infos)
            self.routers.append(routing)
        for name in self.infos:
            self.say(name)

    def say(
        self, name: ReplicaId, stored: list[BlockHash] | None = None, *, is_draining: bool = False
    ) -> None:
        self.seq += 1
        hints = tuple(to_hints(stored or []))
        batch = EventBatch(FORMAT_VERSION, 1, self.seq, hints, (), Digest(), load(is_draining=is_draining))
        for routing in self.routers:
            routing.on_events(name, batch)

    def query(self, prefix: str) -> RouteQuery:
        """A prompt with that prefix and a tail of its own."""
        self.num_asked += 1
        name = f"q{self.num_asked}"
        hashes = chain(name, 1, parent=chain(prefix, PREFIX_BLOCKS))
        return query(name, block_hashes=hashes, num_prompt_tokens=16 * len(hashes) + 1)

    def ask(
        self, prefix: str, router: int, *, is_over: bool = False, excluded: frozenset[ReplicaId] = frozenset()
    ) -> ReplicaId:
        asked = self.query(prefix)._replace(excluded=excluded)
        routing = self.routers[router]
        chosen = routing.choose(asked).replica_id
        routing.routed(asked.request_id, chosen)
        if is_over:
            routing.first_token(asked.request_id, chosen, 0)
            routing.finish(asked.request_id)
        return chosen


@settings(max_examples=15, deadline=None)
@given(
    num_replicas=st.integers(2, 6),
    num_routers=st.integers(1, 3),
    uses=st.integers(8, 40),
    num_prefixes=st.integers(1, 3),
    burst=st.integers(2, 9),
    leaves_by=st.sampled_from(["drain", "membership", "lost requests"]),
)
def test_each_hot_prefix_of_a_leaving_replica_gets_one_new_home(
    num_replicas: int, num_routers: int, uses: int, num_prefixes: int, burst: int, leaves_by: str
) -> None:
    fleet = Fleet(num_replicas, num_routers)
    prefixes = [f"prefix{index}" for index in range(num_prefixes)]
    for prefix in prefixes:
        fleet.say(LEAVER, chain(prefix, PREFIX_BLOCKS))
        for _ in range(uses):
            for router in range(num_routers):
                fleet.ask(prefix, router, is_over=True)
                fleet.clock.advance(0.5 / num_routers)
    for name in fleet.infos:
        fleet.say(name, is_draining=leaves_by == "drain" and name == LEAVER)
    excluded: frozenset[ReplicaId] = frozenset()
    if leaves_by == "membership":
        del fleet.infos[LEAVER]
        for routing in fleet.routers:
            routing.update_replicas(fleet.infos)
    elif leaves_by == "lost requests":  # its connections end before anybody says that it died
        excluded = frozenset({LEAVER})
        for routing in fleet.routers:
            routing.request_lost()
    homes: dict[str, set[ReplicaId]] = {prefix: set() for prefix in prefixes}
    for number in range(burst):
        for prefix in prefixes:
            homes[prefix].add(fleet.ask(prefix, number % num_routers, excluded=excluded))
    assert all(len(home) == 1 for home in homes.values()), homes
    assert LEAVER not in set().union(*homes.values())


@settings(max_examples=15, deadline=None)
@given(num_replicas=st.integers(3, 6), num_routers=st.integers(1, 3), num_prefixes=st.integers(1, 3))
def test_who_was_on_the_way_to_it_goes_where_new_requests_go(
    num_replicas: int, num_routers: int, num_prefixes: int
) -> None:
    """Decided before it left, and not accepted yet: Serve asks for another order."""
    fleet = Fleet(num_replicas, num_routers)
    prefixes = [f"prefix{index}" for index in range(num_prefixes)]
    for prefix in prefixes:
        fleet.say(LEAVER, chain(prefix, PREFIX_BLOCKS))
        for number in range(8 * num_routers):
            fleet.ask(prefix, number % num_routers, is_over=True)
            fleet.clock.advance(0.5)
    on_the_way = [
        (prefix, routing, asked.request_id)
        for prefix in prefixes
        for routing in fleet.routers
        for asked in [fleet.query(prefix)]
        if routing.choose(asked).replica_id == LEAVER
    ]
    assert len(on_the_way) == num_prefixes * num_routers
    del fleet.infos[LEAVER]
    for routing in fleet.routers:
        routing.update_replicas(fleet.infos)
    homes: dict[str, set[ReplicaId]] = {prefix: set() for prefix in prefixes}
    for prefix, routing, request_id in on_the_way:
        ranks = routing.rerank(request_id, sorted(fleet.infos))
        assert sorted(ranks) == sorted(fleet.infos)
        routing.routed(request_id, ranks[0])
        homes[prefix].add(ranks[0])
    for prefix in prefixes:
        homes[prefix] |= {fleet.ask(prefix, router) for router in range(num_routers)}
    assert all(len(home) == 1 for home in homes.values()), homes


@given(st.integers(0, 2**64 - 1), st.permutations([replica_id(index) for index in range(6)]))
def test_the_heir_is_the_same_whoever_asks_and_changes_only_if_it_leaves(
    prefix: int, replicas: list[ReplicaId]
) -> None:
    hint = HashHint(prefix)
    chosen = heir(hint, replicas)
    assert heir(hint, sorted(replicas)) == chosen
    others = [name for name in replicas if name != chosen]
    assert heir(hint, [chosen, *others[1:]]) == chosen
    assert heir(hint, others) in others


def test_what_is_left_behind_is_shared_out() -> None:
    replicas = [replica_id(index) for index in range(4)]
    heirs = [heir(HashHint(index * 0x9E3779B97F4A7C15 % 2**64), replicas) for index in range(400)]
    assert all(60 < heirs.count(name) < 140 for name in replicas)


def test_until_then_its_one_holder_is_heir_and_another_copy_no_investment() -> None:
    fleet, hashes = Fleet(4, 1), chain("p", PREFIX_BLOCKS)
    [routing] = fleet.routers
    for _ in range(40):
        fleet.ask("p", 0, is_over=True)
    fleet.clock.advance(10.0)  # nobody expects anything any more
    fleet.say(replica_id(1), hashes)

    def heir_and_hot_tokens() -> tuple[ReplicaId | None, int]:
        asked = query("asks", block_hashes=hashes, num_prompt_tokens=len(hashes) * BLOCK_SIZE + 1)
        request = routing.weigh(asked).request
        return request.heir.replica_id if request.heir is not None else None, request.shape.hot_tokens

    all_of_it = len(hashes) * BLOCK_SIZE
    assert heir_and_hot_tokens() == (None, all_of_it)
    del fleet.infos[LEAVER]
    routing.update_replicas(fleet.infos)
    fleet.clock.advance(29.0)
    assert heir_and_hot_tokens() == (replica_id(1), 0)
    fleet.say(replica_id(2), hashes)
    assert heir_and_hot_tokens() == (None, all_of_it), "two have it"


def test_after_a_while_a_hot_prefix_may_have_copies_again() -> None:
    fleet = Fleet(4, 1)
    for _ in range(30):
        fleet.ask("p", 0, is_over=True)
    del fleet.infos[LEAVER]
    fleet.routers[0].update_replicas(fleet.infos)
    fleet.clock.advance(SETTLES_S + 1.0)
    for name in fleet.infos:
        fleet.say(name)
    assert len({fleet.ask("p", 0) for _ in range(9)}) > 1


@settings(max_examples=10, deadline=None)
@given(num_replicas=st.integers(3, 6), num_routers=st.integers(1, 3), burst=st.integers(2, 5))
def test_a_shadow_of_the_same_policy_agrees_while_prefixes_find_their_new_homes(
    num_replicas: int, num_routers: int, burst: int
) -> None:
    fleet = Fleet(num_replicas, num_routers)
    shadows = []
    for place, routing in enumerate(fleet.routers):
        peers = (place, num_routers)
        context = PolicyContext(BLOCK_SIZE, fleet.clock, random.Random(place), lambda peers=peers: peers)  # type: ignore[misc]
        shadows.append(Shadow(make_policy("expected_time", {}, context=context)))
        routing.watch(shadows[-1])
    prefixes = [f"prefix{index}" for index in range(3)]
    for prefix in prefixes:
        fleet.say(LEAVER, chain(prefix, PREFIX_BLOCKS))
        for _ in range(20):
            for router in range(num_routers):
                fleet.ask(prefix, router, is_over=True)
    fleet.say(LEAVER, is_draining=True)
    for prefix in prefixes:
        for _ in range(burst):
            for router in range(num_routers):
                fleet.ask(prefix, router)
    assert [shadow.totals.disagreed for shadow in shadows] == [0] * num_routers
    assert all(shadow.totals.agreed > 3 * burst for shadow in shadows)
