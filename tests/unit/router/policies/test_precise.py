"""Policies that place by what replicas really hold, the candidates' `cached_tokens`. Blocks of 16 tokens."""

from __future__ import annotations

import pytest

from cache.types import RequestId
from router.policies.indexes.hash_ring import HashRing, position
from tests.fakes.policies import Bench, busy, candidate, candidates, cold, of_blocks
from tests.fakes.router import STEP_TIME, hint_chain

DOC = of_blocks(hint_chain("doc", 200))  # 3,200 tokens


def costs(bench: Bench, among: list, request: object = DOC) -> dict[str, float | None]:  # type: ignore[type-arg]
    return {scored.replica_id: scored.cost for scored in bench.rank(among, request)}  # type: ignore[arg-type]


# --- production-stack, KV aware --------------------------------------------------------------------


def test_kv_aware_takes_a_holder_that_misses_at_most_2000_tokens() -> None:
    bench = Bench("prodstack_kv_aware")
    assert bench.choice([candidate("a"), busy("b", 90)._replace(cached_tokens=1200)], DOC) == "b"
    bench.sent("a", DOC)
    bench.sent("b", DOC)
    almost = [candidate("a"), candidate("b", 1199), candidate("c")]
    assert bench.choice(almost, DOC) == "c"  # the lowest rate


def test_kv_aware_takes_any_holder_of_a_short_prompt() -> None:
    bench = Bench("prodstack_kv_aware")
    short = of_blocks(hint_chain("short", 100))
    assert bench.choice([candidate("a"), candidate("b", 16), candidate("c")], short) == "b"
    bench.sent("a", short)
    assert bench.choice(candidates("abc"), short) == "b"  # nobody holds anything: by rate, the first of two


def test_kv_aware_goes_by_session_where_nobody_holds_enough() -> None:
    bench = Bench("prodstack_kv_aware")
    ring = HashRing(160)
    for each in candidates("abc"):
        ring.add(each.replica_id)
    request = of_blocks(hint_chain("doc", 200), session="s7")
    assert bench.choice(candidates("abc"), request) == next(ring.walk(position("s7")))


# --- llm-d -----------------------------------------------------------------------------------------


def test_llmd_adds_the_exact_match_to_queue_and_cache() -> None:
    """Queues 3, 0: 0 and 1. a: 0 + 2 * 0.5 + 3 * 150 / 200 = 3.25; b: 2 + 2 * 1 = 4."""
    bench = Bench("llmd_precise")
    among = [candidate("a", 2400, num_waiting=3, used_fraction=0.5), candidate("b")]
    assert costs(bench, among) == {"a": -3.25, "b": -4.0}
    assert bench.choice(among, DOC) == "b"
    assert bench.choice([candidate("a", 2400, used_fraction=0.5), candidate("b")], DOC) == "a"


# --- Dynamo and Ray --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dynamo_kv", "ray_kv_aware"])
def test_dynamo_adds_prefill_and_blocks_in_use(name: str) -> None:
    """a: (800 + 3200 - 1600) / 16 = 150, and 50 of another prompt and this one's 200; b: 200 and 200."""
    among = [candidate("a", 1600, queued_tokens=800), candidate("b")]
    assert costs(busy_bench(name), among) == {"a": 400.0, "b": 400.0}
    only_match = busy_bench(name, overlap_score_weight=2.0)  # (4000 - 3200) / 16 + 250
    assert costs(only_match, among)["a"] == 300.0
    light_prefill = busy_bench(name, prefill_load_scale=0.5)
    assert costs(light_prefill, among) == {"a": 325.0, "b": 300.0}


def busy_bench(name: str, **options: object) -> Bench:
    """a has a prompt of 50 blocks in flight."""
    bench = Bench(name, options=options)
    bench.sent("a", of_blocks(hint_chain("other", 50), name="other"))
    return bench


def test_dynamo_counts_blocks_from_sending_to_the_end_whatever_replicas_report() -> None:
    """What waits in an engine's queue holds no blocks there, and counts here."""
    bench = busy_bench("dynamo_kv")
    among = [candidate("a", used_fraction=0.0), candidate("b", used_fraction=0.9)]
    assert costs(bench, among) == {"a": 450.0, "b": 400.0}
    bench.sent("b", of_blocks(hint_chain("other", 50), name="other"))  # b accepted it in the end
    assert costs(bench, among) == {"a": 400.0, "b": 450.0}
    bench.policy.finished(RequestId("other"), ())
    assert costs(bench, among) == {"a": 400.0, "b": 400.0}


def test_dynamo_counts_what_prompts_in_flight_share_once() -> None:
    bench = Bench("dynamo_kv")
    bench.sent("a", of_blocks(DOC.hints[:150], name="first"))
    bench.sent("a", of_blocks([*DOC.hints[:100], *hint_chain("own", 7)], name="second"))
    assert costs(bench, candidates("ab")) == {"a": 200.0 + 207, "b": 200.0 + 200}
    bench.policy.finished(RequestId("first"), ())
    assert costs(bench, candidates("ab"))["a"] == 200.0 + 207  # 107 in use, 100 of which are its own
    bench.leave("a")
    bench.join("a")
    assert costs(bench, candidates("ab"))["a"] == 200.0 + 200


def test_dynamo_never_credits_more_than_there_is_to_compute() -> None:
    bench = Bench("dynamo_kv", options={"overlap_score_weight": 4.0})
    assert costs(bench, [candidate("a", 1600)]) == {"a": 200.0}  # its own blocks, which all would take


def test_dynamo_draws_by_softmax_when_warm() -> None:
    """Costs 200, 100, 0 scale to 1, 0.5, 0; at temperature 0.5 weights are e^-2, e^-1, 1: 9, 24, 67 %."""
    bench = Bench("dynamo_kv", options={"router_temperature": 0.5})
    among = [candidate("a"), candidate("b", 1600), candidate("c", 3199)]
    drawn = bench.choices(among, DOC, times=2000)
    assert drawn["c"] / 2000 == pytest.approx(0.665, abs=0.05)
    assert drawn["b"] / 2000 == pytest.approx(0.245, abs=0.05)
    assert drawn["a"] / 2000 == pytest.approx(0.090, abs=0.03)


def test_ray_draws_where_nobodys_tokens_can_be_compared() -> None:
    blind = [each._replace(is_matched=False) for each in (busy("a", 50), busy("b", 0), busy("c", 0))]
    drawn = Bench("ray_kv_aware").choices(blind, DOC)
    assert set(drawn) == {"a", "b", "c"}


# --- Mooncake --------------------------------------------------------------------------------------


def test_mooncake_adds_the_queue_and_what_is_left_to_prefill() -> None:
    """Steps of 512 tokens, 0.01 s and 0.0001 s a token, 0.001 s a sequence.
    a: 0.5 + 7 steps * 0.011 + 0.32 = 0.897; b: 0.6 + 4 steps * 0.011 + 0.16 = 0.804."""
    bench = Bench("mooncake_min_ttft")
    among = [candidate("a", backlog_s=0.5), candidate("b", 1600, backlog_s=0.6)]
    priced = costs(bench, among)
    expected = [
        each.load.backlog_s + STEP_TIME.prefill_s(3200 - each.cached_tokens, each.cached_tokens, 512)
        for each in among
    ]
    assert [priced["a"], priced["b"]] == pytest.approx(expected)
    assert priced["a"] == pytest.approx(0.897)
    assert priced["b"] == pytest.approx(0.804)


def test_mooncake_counts_tokens_until_all_have_measured_themselves() -> None:
    bench = Bench("mooncake_min_ttft")
    among = [candidate("a", queued_tokens=100, step_time=None), candidate("b", 1600, queued_tokens=1800)]
    assert costs(bench, among) == {"a": 3300.0, "b": 3400.0}


# --- LMetric ---------------------------------------------------------------------------------------


def test_lmetric_multiplies_tokens_and_requests() -> None:
    among = [
        candidate("a", 2400, num_requests=4),
        candidate("b", num_requests=1),
        candidate("c", 2400, num_requests=1, queued_tokens=1000),
    ]
    assert costs(Bench("lmetric"), among) == {"a": 4000.0, "b": 6400.0, "c": 3600.0}
    assert costs(Bench("lmetric", options={"count_queued": False}), among) == {
        "a": 4000.0,
        "b": 6400.0,
        "c": 1600.0,
    }


def test_equals_are_drawn() -> None:
    for name in ("llmd_precise", "dynamo_kv", "ray_kv_aware", "mooncake_min_ttft", "lmetric"):
        assert set(Bench(name).choices(candidates("abc"), cold("p"))) == {"a", "b", "c"}, name
