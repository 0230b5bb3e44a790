"""One behaviour suite for every policy, then what is the registry's, round robin's and expected time's own.

The other policies' worked examples are in the files beside this one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from cache.errors import ConfigError
from cache.types import ReplicaId, RequestId
from router.placement.routing import Routing
from router.policies import NAMES, Policy, PolicyRequest, check_policy, make_policy
from router.pricing.cost import Candidate, RequestShape
from tests.fakes.policies import Bench, candidate, cold, contents, of_blocks
from tests.fakes.router import (
    FakeClock,
    config,
    context,
    hint_chain,
    info,
    load,
    query,
    replica_id,
)

SHAPE = RequestShape(1000)
REQUEST = PolicyRequest(RequestId("r"), SHAPE)

# Sequential cold prompts on an idle fleet: these take turns, so nobody strays far from the mean ...
TAKE_TURNS = ("expected_time", "round_robin", "ray_prefix_affinity", "aibrix_preble", "preble")
# ... session affinity and its like go by the rate of the last minute, which empties in steps ...
BY_RATE = ("session_affinity", "prodstack_kv_aware")
# ... and this one's source takes the first of equals, so an idle fleet's cold prompts all go to one.
TAKE_FIRST = ("sglang_cache_aware",)
# All others draw among equals, or hash the prompt.

# A burst of cold prompts, nothing reported in between: these do not look at load, or only at two replicas',
# or bound it, so they are even on average only.
UNEVEN_BURST = ("random", "power_of_two", "chwbl", "prodstack_prefix", "prodstack_simhash")

# Options that make the bound on memory bind within the 20,000 prompts of the test.
SMALL = {
    "sglang_cache_aware": {"max_tree_chars": 100_000},
    "ray_prefix_affinity": {"max_tree_chars": 100_000},
    "prodstack_prefix": {"max_chunks": 5_000},
    "aibrix_prefix": {"max_chunks": 5_000},
}


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    made = make_policy(request.param, context=context(seed=7))
    for index in range(20):
        made.replica_added(ReplicaId(f"r{index}"), info())
    return made


def some_candidates(
    rng: random.Random, names: Iterable[str], request: PolicyRequest = REQUEST
) -> list[Candidate]:
    return [
        candidate(
            name,
            rng.randrange(request.shape.num_prompt_tokens),
            backlog_s=rng.random(),
            last_chosen=rng.randrange(50),
            num_requests=rng.randrange(80),
            num_in_flight=rng.randrange(80),
            num_waiting=rng.randrange(9),
            queued_tokens=rng.randrange(9000),
            used_fraction=rng.random(),
        )
        for name in names
    ]


# --- every policy ------------------------------------------------------------------------------


def test_every_candidate_is_ranked_exactly_once(policy: Policy) -> None:
    rng = random.Random(3)
    for count in range(1, 20):
        for hints in ((), hint_chain("p", 40), hint_chain(f"p{count}", 3)):
            request = of_blocks(hints, session="s")
            among = some_candidates(rng, [f"r{i}" for i in range(count)], request)
            before = list(among)
            hints_before = list(request.hints)
            ranked = policy.rank(among, request)
            assert Counter(scored.candidate for scored in ranked) == Counter(among)
            assert among == before
            assert list(request.hints) == hints_before
            policy.routed(ranked[0].replica_id, request)


def test_replicas_that_never_joined_can_be_ranked(policy: Policy) -> None:
    """Membership may be told after the first candidates of it are seen."""
    strangers = [candidate("x"), candidate("y", 32)]
    assert {scored.replica_id for scored in policy.rank(strangers, cold("p"))} == {"x", "y"}
    policy.routed(ReplicaId("x"), cold("p"))
    assert contents(policy)["x"] == 0


def test_one_candidate_is_the_choice(policy: Policy) -> None:
    only = candidate("only", backlog_s=1e6, num_requests=1000)
    assert [scored.replica_id for scored in policy.rank([only], REQUEST)] == ["only"]


def test_uncalibrated_replicas_can_be_ranked(policy: Policy) -> None:
    ranked = policy.rank([candidate("a", step_time=None), candidate("b", step_time=None)], REQUEST)
    assert {scored.replica_id for scored in ranked} == {"a", "b"}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_and_story_give_the_same_decisions(name: str) -> None:
    def story() -> list[list[ReplicaId]]:
        bench, rng = Bench(name, seed=5), random.Random(11)
        decisions = []
        for index in range(150):
            request = of_blocks(hint_chain(f"p{rng.randrange(20)}", 4 + rng.randrange(8)), name=str(index))
            ranked = bench.rank(some_candidates(rng, "abc", request), request)
            bench.sent(ranked[0].replica_id, request)
            bench.clock.advance(0.5)
            decisions.append([scored.replica_id for scored in ranked])
        return decisions

    assert story() == story()


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_that_left_is_not_remembered(name: str) -> None:
    bench = Bench(name, "ab")
    size = None
    for visit in range(30):
        visitor = f"visitor{visit}"
        bench.policy.replica_added(ReplicaId(visitor), info())
        for index in range(10):
            request = of_blocks(
                hint_chain(f"p{index}", 4)
            )  # the same prompts in each round, so that they add nothing
            bench.rank([candidate("a"), candidate("b"), candidate(visitor)], request)
            bench.sent(("a", "b", visitor)[index % 3], request)
        bench.leave(visitor)
        assert contents(bench.policy)[visitor] == 0
        if visit == 1:
            size = contents(bench.policy).total()
    if name in ("aibrix_preble", "preble"):
        bench.clock.advance(3600.0)  # requests of the window are counted, whoever got them
        bench.rank([candidate("a")], cold("p"))
    assert size is not None
    assert contents(bench.policy).total() <= size


@pytest.mark.parametrize("name", NAMES)
def test_unique_prompts_do_not_fill_the_memory(name: str) -> None:
    """4,000 prompts that never come again in 10,000 s, on engines of 500 blocks: half of them fill it."""
    bench = Bench(name, "abcd", SMALL.get(name), num_blocks=500)
    sizes = []
    for index in range(4_000):
        hints = [hash((index, block)) & (2**64 - 1) for block in range(6)]
        among = [candidate(replica) for replica in "abcd"]
        bench.place(among, of_blocks(hints, name=str(index)))  # type: ignore[arg-type]
        bench.policy.finished(RequestId(str(index - 50)), ())  # those in flight are remembered, and few
        bench.clock.advance(2.5)
        if index in (1_999, 3_999):
            sizes.append(contents(bench.policy).total())
    assert sizes[1] <= sizes[0] * 1.05 + 50


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("is_measured", [True, False])
def test_cold_prompts_one_after_another(name: str, num_replicas: int, is_measured: bool) -> None:
    """Every replica is idle whenever the next prompt comes."""
    clock = FakeClock()
    routing = Routing(config(policy=name), clock=clock)
    routing.update_replicas({replica_id(i): info() for i in range(num_replicas)})
    counts: Counter[ReplicaId] = Counter()
    for index in range(40 * num_replicas):
        for i in range(num_replicas):
            routing.on_load(replica_id(i), load() if is_measured else load(step_time=None))
        placement = routing.choose(query(f"cold{index}"))
        counts[placement.replica_id] += 1
        routing.finish(placement.request_id)
        clock.advance(1.0)
    if name in TAKE_FIRST:
        assert set(counts) == {replica_id(0)}
        return
    reach = 8 if name in TAKE_TURNS + BY_RATE else 24  # of 40; four standard deviations of a draw
    assert len(counts) == num_replicas
    assert min(counts.values()) >= 40 - reach
    assert max(counts.values()) <= 40 + reach


@pytest.mark.parametrize("name", NAMES)
def test_a_burst_of_cold_prompts_spreads(name: str) -> None:
    """Nothing is released and nothing reported in between: reservations alone must do it."""
    routing = Routing(config(policy=name), clock=FakeClock())
    routing.update_replicas({replica_id(i): info() for i in range(4)})
    counts = Counter(routing.choose(query(f"burst{i}")).replica_id for i in range(64))
    if name in UNEVEN_BURST:
        assert min(counts.values()) >= 4
        assert max(counts.values()) <= 28
    else:
        assert set(counts.values()) == {16}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [16, 512])
def test_prompts_too_short_for_a_block_are_placed(name: str, block_size: int) -> None:
    bench = Bench(name, "abc", block_size=block_size)
    for _ in range(10):
        short = PolicyRequest(RequestId("r"), RequestShape(3))
        assert bench.place([candidate(r) for r in "abc"], short) in "abc"


# --- the registry --------------------------------------------------------------------------------


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="expected_time, round_robin"):
        make_policy("fastest", context=context())


def test_all_policies_of_the_comparison_are_there() -> None:
    assert {
        "expected_time",
        "round_robin",
        "random",
        "least_outstanding",
        "power_of_two",
        "session_affinity",
        "chwbl",
        "sglang_cache_aware",
        "prodstack_prefix",
        "prodstack_simhash",
        "prodstack_kv_aware",
        "aibrix_prefix",
        "aibrix_preble",
        "gie_epp",
        "llmd_precise",
        "dynamo_kv",
        "ray_kv_aware",
        "ray_prefix_affinity",
        "preble",
        "mooncake_min_ttft",
        "lmetric",
    } == set(NAMES)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("chwbl", {"load_faktor": 2.0}, "prefix_chars, replication, load_factor"),
        ("chwbl", {"load_factor": 0.5}, "between 1.0 and 100.0"),
        ("sglang_cache_aware", {"cache_threshold": "half"}, "must be a number"),
        ("preble", {"enable_eviction": 1}, "must be true or false"),
        ("mooncake_min_ttft", {"weight": 1.0}, "these options: none"),
        ("ray_prefix_affinity", {"eviction_target_chars": 500_000}, "between 0 and 400000"),
    ],
)
def test_a_wrong_option_is_refused_with_what_it_may_be(
    name: str, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_policy(name, options)


# --- each one's own -----------------------------------------------------------------------------


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
    near = [candidate("a", backlog_s=0.010, num_requests=5), candidate("b", backlog_s=0.0101, num_requests=1)]
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
