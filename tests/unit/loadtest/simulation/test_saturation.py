"""Load 1.0, by hand and by simulation."""

from __future__ import annotations

import pytest

from loadtest.simulation.cell import IDEAL
from loadtest.simulation.machine import Machine
from loadtest.simulation.run import simulate
from loadtest.simulation.saturation import (
    pooled_hits,
    saturation_rate_per_s,
    work_by_request,
    work_per_request,
)
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, Blocks, request, spec, unrelated, workload


def test_work_by_hand() -> None:
    """One request of 32 tokens and 5: half a step of prefill, four steps shared with all that fit.

    A fleet of 80 tokens holds 80 / (32 + 2.5) = 2.32 of them.
    """
    work = work_per_request(unrelated((0.0, 32, 5)), num_replicas=3, cache_tokens=80, machine=MACHINE)
    assert work.decoding == pytest.approx(80 / 34.5)
    prefill_s = 0.01 * 32 / 64 + 0.001 * 32 + 1e-6 * 32 * 16 + 0.002
    decode_s = 0.01 * 4 / work.decoding + 0.001 * 4 + 1e-6 * 4 * (32 + 2) + 0.002 * 4
    assert work.seconds == pytest.approx(prefill_s + decode_s)
    assert work.uncached_tokens == 32
    assert work.hit_ratio == 0.0
    rate = saturation_rate_per_s(unrelated((0.0, 32, 5)), num_replicas=3, cache_tokens=80, machine=MACHINE)
    assert rate == pytest.approx(3 / (prefill_s + decode_s))


def test_the_work_of_each_is_part_of_the_mean() -> None:
    load = unrelated((0.0, 32, 9), (1.0, 200, 1), (2.0, 5, 40))
    fleet = {"num_replicas": 2, "cache_tokens": 64 * BLOCK_TOKENS}
    each = work_by_request(load, **fleet, machine=MACHINE)
    mean = work_per_request(load, **fleet, machine=MACHINE)
    assert sum(each) / 3 == pytest.approx(mean.seconds)
    assert each[1] == pytest.approx(200 / 64 * MACHINE.base_s + 200 * 0.001 + 200 * 200 / 2 * 1e-6 + 0.002)


def test_a_pooled_cache_hits_what_came_before_and_forgets_the_oldest() -> None:
    first = request(0.0, 40, 20, (0, 1, 2), session=1)
    other = request(1.0, 48, 1, (5, 6, 7), session=2)
    second = request(2.0, 70, 5, (0, 1, 10, 11, 12), session=1)
    work = workload(first, other, second)
    assert pooled_hits(work, 1000) == [0, 0, 48]  # with the block that the answer filled
    assert pooled_hits(work, 6 * BLOCK_TOKENS) == [0, 0, 48]
    assert pooled_hits(work, 5 * BLOCK_TOKENS) == [0, 0, 32]  # leaves leave first
    assert pooled_hits(work, 3 * BLOCK_TOKENS) == [0, 0, 0]


def test_a_repeated_prompt_computes_at_least_its_last_block() -> None:
    twin = request(0.0, 32, 1, (0, 1))
    assert pooled_hits(workload(twin, twin), 1000) == [0, 16]


def test_nothing_has_no_rate() -> None:
    with pytest.raises(ValueError, match="no requests"):
        saturation_rate_per_s(workload(), num_replicas=1, cache_tokens=100, machine=MACHINE)


@pytest.mark.parametrize(("load", "grows"), [(0.8, False), (1.3, True)])
def test_queues_grow_above_load_1_and_not_below(load: float, grows: bool) -> None:
    """Waits of the last third against the middle one, with arrivals as even as can be."""
    machine = Machine(
        base_s=0.01, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.002,
        max_batched_tokens=64, max_running=8, max_model_len=4096,
    )  # fmt: skip
    blocks = Blocks()
    shape = [(64, 40, blocks.extend((), 64)) for _ in range(600)]
    fleet = {"num_replicas": 2, "cache_tokens": 2048, "machine": machine}
    probe = workload(*(request(0.0, *one, session=i) for i, one in enumerate(shape)))
    rate = load * saturation_rate_per_s(probe, num_replicas=2, cache_tokens=2048, machine=machine)
    work = workload(*(request(i / rate, *one, session=i) for i, one in enumerate(shape)))
    waits = simulate(work, spec(policy=IDEAL, **fleet)).ttft_s
    assert (waits[400:].mean() > 1.3 * waits[200:400].mean()) == grows
