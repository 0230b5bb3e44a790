"""Preble and AIBrix's port of it: a tree of tokens with what its nodes cost lately. Blocks of 16 tokens."""

from __future__ import annotations

import pytest

from router.policies.profiled_prefill import A6000_MISTRAL_7B, V100_MISTRAL_7B
from tests.fakes.policies import Bench, busy, candidate, candidates, cold, of_blocks
from tests.fakes.router import STEP_TIME, hint_chain

ABC = candidates("abc")
DOC = hint_chain("doc", 40)  # 640 tokens


# --- the profiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "context", "milliseconds"),
    [
        (100, 500, 22.0 + 0.32),
        (300, 500, -118 + 1.25 * 300 - 2.56e-3 * 300**2 + 0.32),
        (1000, 2000, 4.209777 + 108.4257 + (0.159 + 0.372) / 2),
        (2000, 2000, 4.209777 + 216.8514 + 0.159 + 0.372),
        (8192, 8192, 4.209777 + 888.2233 + 0.159 + 1.523712 - 7.37 + 31.62112 + 144.955146),
    ],
)
def test_the_a6000_profile_by_hand(num_tokens: int, context: int, milliseconds: float) -> None:
    assert A6000_MISTRAL_7B.seconds(num_tokens, context) == pytest.approx(milliseconds / 900, rel=1e-4)


def test_the_v100_takes_about_two_and_a_half_times_as_long() -> None:
    for num_tokens in (100, 250, 500, 2000, 10_000):
        ratio = V100_MISTRAL_7B.seconds(num_tokens, num_tokens) / A6000_MISTRAL_7B.seconds(
            num_tokens, num_tokens
        )
        assert 2.3 < ratio < 2.7


# --- AIBrix's port ---------------------------------------------------------------------------------


def test_aibrix_preble_goes_to_the_holder_of_more_than_half_used_least() -> None:
    bench = Bench("aibrix_preble")
    bench.sent("b", of_blocks(DOC))
    bench.sent("c", of_blocks(DOC))
    bench.sent("b", of_blocks(DOC))
    bench.sent("b", cold("p"))
    assert bench.choice([busy("a", 0), busy("b", 0), busy("c", 8)], of_blocks(DOC)) == "c"


def test_aibrix_preble_explores_at_half_a_match() -> None:
    bench = Bench("aibrix_preble")
    bench.sent("a", of_blocks(DOC[:20]))
    assert bench.choice(ABC, of_blocks(DOC[:39])) == "a"
    assert bench.choice(ABC, of_blocks(DOC)) == "b"


@pytest.mark.parametrize(("most", "matched", "cold_one"), [(8, "c", "a"), (9, "b", "b")])
def test_aibrix_preble_beyond_eight_requests_apart_chooses_the_least_loaded_alone(
    most: int, matched: str, cold_one: str
) -> None:
    """c holds all of it and b its beginning; nothing was sent to a, so by the window it is idle."""
    bench = Bench("aibrix_preble")
    bench.sent("b", of_blocks(DOC[:20]))
    bench.sent("c", of_blocks(DOC))
    among = [busy("a", 3), busy("b", 0), busy("c", most)]
    assert bench.choice(among, of_blocks(DOC)) == matched
    assert bench.choice(among, cold("p")) == cold_one
    assert len(bench.rank(among, cold("p"))) == 3


def test_aibrix_preble_work_is_prefill_and_decode_of_the_window() -> None:
    """One cold prompt of 640 tokens: 640 tokens on a V100, and 45 tokens of 0.15 s."""
    bench = Bench("aibrix_preble")
    bench.sent("a", of_blocks(DOC))
    ranked = {scored.replica_id: scored.cost for scored in bench.rank(ABC, cold("p"))}
    assert ranked["a"] == pytest.approx(V100_MISTRAL_7B.seconds(640, 640) + 45 * 0.15)
    assert ranked["b"] == ranked["c"] == 0.0
    bench.clock.advance(180.1)
    assert all(scored.cost == 0.0 for scored in bench.rank(ABC, cold("p")))


# --- Preble ----------------------------------------------------------------------------------------


def test_preble_exploits_when_more_is_cached_than_new() -> None:
    bench = Bench("preble")
    bench.sent("b", of_blocks(DOC[:20]))
    assert bench.choice(ABC, of_blocks(DOC[:39])) == "b"  # 20 known, 19 new
    assert bench.choice(ABC, of_blocks(DOC)) != "b"  # 20 and 20


def test_preble_explores_where_the_work_of_the_window_is_least() -> None:
    bench = Bench("preble", options={"enable_eviction": False})
    bench.rank(ABC, cold("speed"))  # learns how fast the engines are
    bench.sent("a", of_blocks(DOC))
    bench.sent("b", cold("p", 10))
    ranked = bench.rank(ABC, cold("q", 10))
    assert [scored.replica_id for scored in ranked] == ["c", "b", "a"]
    assert ranked[2].cost == pytest.approx(STEP_TIME.prefill_s(640, 0, 512))


def test_preble_counts_what_is_running_as_decoding() -> None:
    """45 tokens each at the time of one step of all that run: 3 * (0.01 + 3 * 0.0001 + 3 * 0.001)."""
    bench = Bench("preble")
    running = candidate("a", num_requests=3, num_running=3)
    cost = bench.rank([running], cold("q"))[0].cost
    assert cost == pytest.approx(3 * 45 * STEP_TIME.step_s(3, 0.0, 3))
    unmeasured = candidate("a", num_requests=3, num_running=3, step_time=None)
    assert Bench("preble").rank([unmeasured], cold("q"))[0].cost == pytest.approx(3 * 45 * 0.15)


def test_preble_prices_what_a_new_prompt_would_push_out() -> None:
    """20 new blocks would push out b's oldest 40: computed again once, as one request asked for them."""
    bench = Bench("preble")
    bench.rank(ABC, cold("speed"))  # learns how fast the engines are
    bench.sent("b", of_blocks(DOC))
    work_s = STEP_TIME.prefill_s(640, 0, 512)
    without = Bench("preble", options={"enable_eviction": False})
    without.rank(ABC, cold("speed"))
    without.sent("b", of_blocks(DOC))
    with_eviction, bare = (
        {scored.replica_id: scored.cost for scored in each.rank(ABC, cold("q", 20))}
        for each in (bench, without)
    )
    assert bare["b"] is not None
    assert with_eviction["b"] == pytest.approx(bare["b"] + work_s)
    assert with_eviction["a"] == bare["a"] == 0.0


def test_preble_of_several_holders_takes_the_cheapest() -> None:
    bench = Bench("preble")
    bench.sent("b", of_blocks(DOC))
    bench.sent("c", of_blocks(DOC))
    bench.sent("c", of_blocks(hint_chain("more", 40)))
    assert bench.choice(ABC, of_blocks(DOC, extra_tokens=1)) == "b"


def test_preble_does_not_see_a_whole_prompt_again_as_cached() -> None:
    """The node it ends at is all new by its rule, cached or not."""
    bench = Bench("preble")
    bench.sent("b", of_blocks(DOC))
    assert bench.choice(ABC, of_blocks(DOC)) == "a"


def test_preble_forgets_what_left_the_cache() -> None:
    bench = Bench("preble", num_blocks=40)
    bench.sent("b", of_blocks(DOC))
    again = of_blocks(DOC, extra_tokens=1)
    assert bench.choice(ABC, again) == "b"
    bench.sent("b", cold("p", 39))
    assert bench.choice(ABC, again) != "b"


def rebalanced(options: dict[str, object]) -> Bench:
    """Six documents, two requests each, all on a; then one more request when moving them is due."""
    bench = Bench("preble", "ab", {"min_requests_per_replica": 6, **options})
    for index in range(6):
        bench.sent("a", of_blocks(hint_chain(f"doc{index}", 20)))
        bench.sent("a", of_blocks(hint_chain(f"doc{index}", 20)))
    bench.clock.advance(11.0)
    bench.sent("b", cold("last", 1))
    return bench


def homes_of_the_six(bench: Bench) -> list[str]:
    again = [of_blocks(hint_chain(f"doc{index}", 20), extra_tokens=1) for index in range(6)]
    return sorted(bench.choice(candidates("ab"), request) for request in again)


def test_preble_moves_nodes_from_the_costly_to_the_cheap_replica() -> None:
    """12 of work each, 6 against 0: 5 / 1, 4 / 2, 3 / 3, and there it stops."""
    bench = rebalanced({})
    assert homes_of_the_six(bench) == ["a", "a", "a", "b", "b", "b"]


def test_preble_moves_nothing_early_or_when_told_not_to() -> None:
    for options in ({"enable_rebalancing": False}, {"min_requests_per_replica": 50}):
        assert homes_of_the_six(rebalanced(options)) == ["a"] * 6
