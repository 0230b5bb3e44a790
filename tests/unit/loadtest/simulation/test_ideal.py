"""The yardsticks: what true knowledge of every queue gives, with one cache for all and with one for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulation.cell import IDEAL, IDEAL_APART, IDEAL_APART_SHORTEST, IDEAL_SHORTEST, IDEALS
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload
from tests.fakes.simulation import MACHINE, Blocks, request, spec, unrelated, workload, workloads

MODEL = MACHINE.step_time()


def test_what_one_engine_computed_is_there_for_all() -> None:
    """Round robin computes the twin's prompt again on the other replica; the ideal's engines share it."""
    blocks = Blocks().extend((), 64)
    work = workload(request(0.0, 64, 90, blocks), request(1.0, 64, 1, blocks))
    ideal = simulate(work, spec(policy=IDEAL))
    assert ideal.cached_tokens.tolist() == [0, 48]
    assert ideal.replica.tolist() == [0, 1]  # and goes where nobody decodes
    assert simulate(work, spec()).cached_tokens.tolist() == [0, 0]


def test_each_goes_where_its_first_token_comes_soonest() -> None:
    """A long prompt on the first engine, a short one on the second: the third follows the short one."""
    work = unrelated((0.0, 600, 1), (0.0, 60, 1), (0.01, 40, 1))
    assert simulate(work, spec(policy=IDEAL)).replica.tolist() == [0, 1, 1]


def test_the_step_in_progress_is_counted_once() -> None:
    """Worked by hand. Engine 0 computes 64 tokens until 0.078 s, engine 1 20 tokens from 0.06 to 0.092 s.

    At 0.07 s come 20 tokens more, a step of 0.032 s: 0.110 s on engine 0, 0.124 s on engine 1. Who counts the
    64 tokens again, after the end of the step that computes them, expects 0.19 s on engine 0.
    """
    work = unrelated((0.0, 64, 1), (0.06, 20, 1), (0.07, 20, 1))
    result = simulate(work, spec(policy=IDEAL))
    assert result.replica.tolist() == [0, 1, 0]
    step_64, step_20 = MODEL.step_s(64, 64 * 32, 1), MODEL.step_s(20, 20 * 10, 1)
    assert (step_64, step_20) == pytest.approx((0.078048, 0.0322))
    assert result.ttft_s[2] == pytest.approx(step_64 + step_20 - 0.07)


def test_whose_prompt_ends_with_the_step_in_progress_decodes_in_the_next() -> None:
    """Worked by hand: 64 tokens come at 0.07 s; engine 0 computes a prompt until 0.078 s, 1 until 0.092 s.

    Engine 0's decodes on and takes one of a step's 64 tokens, so 64 more are two steps of 0.015 s and 0.064 s
    for their tokens: 0.172 s. Engine 1's is over and leaves nothing: one step, 0.170 s.
    """
    work = unrelated((0.0, 64, 9), (0.06, 20, 1), (0.07, 64, 1))
    assert simulate(work, spec(policy=IDEAL)).replica.tolist() == [0, 1, 1]


def test_a_slow_engine_is_used_when_the_fast_one_is_too_full() -> None:
    work = unrelated(*((0.0, 64, 1) for _ in range(6)))
    replicas = simulate(work, spec(policy=IDEAL, slowdowns=(2.0,))).replica.tolist()
    assert replicas.count(0) == 2


def test_the_short_pass_the_long_that_wait() -> None:
    """One engine: while it computes, a long prompt comes and then a short one."""
    work = unrelated((0.0, 64, 1), (0.01, 600, 1), (0.02, 20, 1))
    served = spec(num_replicas=1, policy=IDEAL)
    fcfs = simulate(work, served)
    shortest = simulate(work, spec(num_replicas=1, policy=IDEAL_SHORTEST))
    first_s = MODEL.prefill_s(64, 0, 64)
    # It shares its step with the start of the long one.
    assert shortest.ttft_s[2] == pytest.approx(first_s + MODEL.step_s(64, 20 * 10 + 44 * 22, 2) - 0.02)
    assert shortest.ttft_s[2] < fcfs.ttft_s[2] / 4
    assert shortest.ttft_s[1] < fcfs.ttft_s[1] + MODEL.step_s(20, 0.0, 1)


@pytest.mark.parametrize(
    ("long_tokens", "floor_s", "least_s", "most_s"),
    [
        (600, 120.0, 7.0, 14.0),  # 0.8 s of prefill more than a short one are made good by 8 s of waiting
        (3000, 20.0, 20.0, 30.0),  # 4 s would take 40: whoever has waited for 20 goes first
    ],
)
def test_the_long_are_not_starved(
    long_tokens: int, floor_s: float, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More short prompts than one engine can take, and a long one among the first of them."""
    monkeypatch.setattr("loadtest.simulation.ideal.AGE_FLOOR_S", floor_s)
    short = [(0.07 * i, 64, 1) for i in range(700)]  # each fills a step, so none takes the long one along
    work = unrelated((0.01, long_tokens, 1), *short)
    result = simulate(work, spec(num_replicas=1, cache_tokens=8000, policy=IDEAL_SHORTEST))
    assert least_s < result.ttft_s[result.input_tokens.argmax()] < most_s


def test_separate_engines_are_no_better_when_memory_is_short() -> None:
    """Four engines' queues for the memory of all: one must not starve the others of it."""
    work = unrelated(*((0.05 * i, 200, 60) for i in range(80)))
    cell = spec(num_replicas=4, cache_tokens=640)
    ideal, apart = (simulate(work, replace(cell, policy=policy)) for policy in (IDEAL, "round_robin"))
    assert ideal.mean_ttft_s < 1.25 * apart.mean_ttft_s
    assert ideal.makespan_s < 1.25 * apart.makespan_s


def test_apart_a_prefix_is_waited_for_while_that_is_sooner() -> None:
    """Worked by hand: a twin's last 16 tokens on engine 0, beside one that decodes, or all 64 on engine 1.

    At 1 s engine 0 is in a step of 0.013 s at most; one with 16 tokens more takes 0.03 s: less than 0.078 s.
    The pooled ideal finds the prefix on the idle engine too (above).
    """
    blocks = Blocks().extend((), 64)
    work = workload(request(0.0, 64, 90, blocks), request(1.0, 64, 1, blocks))
    result = simulate(work, spec(policy=IDEAL_APART))
    assert result.replica.tolist() == [0, 0]
    assert result.cached_tokens.tolist() == [0, 48]
    beside_s = MODEL.step_s(17, 16 * 56 + 136, 2)
    assert beside_s < result.ttft_s[1] < beside_s + MODEL.step_s(1, 136, 1)


def test_apart_a_prefix_behind_a_queue_is_computed_again() -> None:
    """The twin's 48 cached tokens are behind 400 others: 0.4 s of waiting for 0.05 s of work."""
    blocks = Blocks()
    prefix = blocks.extend((), 64)
    work = workload(
        request(0.0, 64, 1, prefix),
        request(1.0, 400, 1, blocks.extend((), 400), session=1),
        request(1.01, 64, 1, prefix),
    )
    result = simulate(work, spec(policy=IDEAL_APART))
    assert result.replica.tolist() == [0, 0, 1]
    assert result.cached_tokens.tolist() == [0, 0, 0]
    pooled = simulate(work, spec(policy=IDEAL))
    assert pooled.replica.tolist() == [0, 0, 1]
    assert pooled.cached_tokens.tolist() == [0, 0, 48]


@pytest.mark.parametrize("policy", [IDEAL_APART, IDEAL_APART_SHORTEST])
def test_apart_what_is_yet_to_be_computed_counts_as_found(policy: str) -> None:
    """Worked by hand. 600 tokens on engine 0, 500 others on engine 1; then come two twins of the first.

    The first twin follows at 0.01 s: 536 tokens are before its last 8 there, and 436 before all its 600 on
    engine 1. The second comes in the same step, and finds what both of them will have computed.
    """
    blocks = Blocks()
    prompt = blocks.extend((), 600)
    work = workload(
        request(0.0, 600, 1, prompt),
        request(0.0, 500, 1, blocks.extend((), 500), session=1),
        request(0.01, 600, 1, prompt),
        request(0.02, 600, 1, prompt),
    )
    result = simulate(work, spec(policy=policy, cache_tokens=2048))
    assert result.replica.tolist() == [0, 1, 0, 0]
    assert result.cached_tokens.tolist() == [0, 0, 592, 592]


def unshared(work: Workload) -> Workload:
    """The same requests, each with blocks of its own and a session of its own."""
    blocks = Blocks()
    return replace(
        work,
        requests=tuple(
            replace(one, block_ids=blocks.extend((), one.input_tokens), session=number)
            for number, one in enumerate(work.requests)
        ),
    )


@given(workloads(), st.integers(1, 3), st.sampled_from([(), (2.0,)]))
@settings(max_examples=40, deadline=None)
def test_without_reuse_it_is_all_one_whose_caches_are(
    work: Workload, num_replicas: int, slowdowns: tuple[float, ...]
) -> None:
    """Nothing is found anywhere, so both place everybody alike, to the bit."""
    work = unshared(work)
    for pooled, apart in ((IDEAL, IDEAL_APART), (IDEAL_SHORTEST, IDEAL_APART_SHORTEST)):
        cell = spec(policy=pooled, num_replicas=num_replicas, cache_tokens=16 * 1024, slowdowns=slowdowns)
        one, own = simulate(work, cell), simulate(work, replace(cell, policy=apart))
        assert own.replica.tolist() == one.replica.tolist()
        assert own.ttft_s.tolist() == one.ttft_s.tolist()
        assert own.e2e_s.tolist() == one.e2e_s.tolist()


@given(workloads())
@settings(max_examples=40, deadline=None)
def test_one_engine_s_cache_is_the_pool(work: Workload) -> None:
    """With a single engine there is nothing to place: times and hits are the same."""
    cell = spec(policy=IDEAL, num_replicas=1, cache_tokens=16 * 1024)
    one, own = simulate(work, cell), simulate(work, replace(cell, policy=IDEAL_APART))
    assert own.cached_tokens.tolist() == one.cached_tokens.tolist()
    assert own.ttft_s.tolist() == one.ttft_s.tolist()


@pytest.mark.parametrize(("pooled", "apart"), [(IDEAL, IDEAL_APART), (IDEAL_SHORTEST, IDEAL_APART_SHORTEST)])
def test_once_every_cache_holds_the_only_prompt_the_two_are_the_same(pooled: str, apart: str) -> None:
    """A queue before the prefix makes the second engine compute it too; from then on nobody finds less than
    in a pool."""
    blocks = Blocks()
    prompt = blocks.extend((), 200)
    filling = [
        request(0.0, 200, 1, prompt),
        request(1.0, 600, 1, blocks.extend((), 600), session=1),
        request(1.01, 200, 1, prompt),
    ]
    later = [request(3.0 + 0.02 * number, 200, 1 + number % 7, prompt) for number in range(60)]
    work = workload(*filling, *later)
    one, own = (simulate(work, spec(policy=policy, cache_tokens=4096)) for policy in (pooled, apart))
    assert own.cached_tokens[:3].tolist() == [0, 0, 0]
    assert own.replica[3:].tolist() == one.replica[3:].tolist()
    assert own.ttft_s[3:].tolist() == one.ttft_s[3:].tolist()


@given(workloads())
@settings(max_examples=40, deadline=None)
def test_everybody_is_served_however_small_the_caches(work: Workload) -> None:
    """The largest request fits, and little else: sequences push each other out, and all end."""
    for policy in IDEALS:
        result = simulate(work, spec(policy=policy, num_replicas=3, cache_tokens=640))
        assert (result.e2e_s > 0).all()
