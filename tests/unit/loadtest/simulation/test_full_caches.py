"""A fleet whose caches hold every prefix once, and few of them twice: 24 of 64 blocks in 2 * 1,024 blocks.

All are hot, so each looks worth another copy, which pushes out one as hot: copies of copies were made until a
tenth of all prompts was computed again, and a replica ten times slower got what the others had no memory for.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from loadtest.simulation.cell import CellResult
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload, WorkRequest
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, spec, workload

NUM_PREFIXES, PREFIX_BLOCKS = 24, 64
RATE_PER_S, DURATION_S, WARM_S = 17.2, 60.0, 20.0  # 60 % of what two replicas can do
SLOW_STEPS = replace(
    MACHINE,
    base_s=0.06,
    per_sequence_s=0.0004,
    per_token_s=2e-5,
    per_attention_s=0.0,
    max_batched_tokens=256,
    max_running=32,
)
BINDINGS = pytest.mark.parametrize(
    "binding", ["late", pytest.param("at_once", marks=(pytest.mark.long, pytest.mark.broad))]
)


def questions(seed: int) -> Workload:
    """The prefixes in turn, each time with a question of its own."""
    draw, arrival_s, requests = random.Random(seed), 0.0, []
    while arrival_s < DURATION_S:
        number = len(requests)
        first = number % NUM_PREFIXES * PREFIX_BLOCKS
        own = NUM_PREFIXES * PREFIX_BLOCKS + 2 * number
        blocks = (*range(first, first + PREFIX_BLOCKS), own, own + 1)
        requests.append(WorkRequest(arrival_s, PREFIX_BLOCKS * BLOCK_TOKENS + 24, 32, blocks, number))
        arrival_s += draw.expovariate(RATE_PER_S)
    return workload(*requests)


def run(num_replicas: int, binding: str, slowdowns: tuple[float, ...] = (), seed: int = 1) -> CellResult:
    cell = spec(
        policy="expected_time",
        num_replicas=num_replicas,
        seed=seed,
        router_options=(("binding", binding),),
        cache_tokens=1024 * BLOCK_TOKENS,
        slowdowns=slowdowns,
        machine=SLOW_STEPS,
    )
    return simulate(questions(seed), cell)


@BINDINGS
def test_copies_do_not_push_out_what_is_as_hot(binding: str) -> None:
    hits, slowest_s = [], []
    for seed in range(1, 4):
        result = run(2, binding, seed=seed)
        warm = result.arrival_s >= WARM_S
        hits.append(result.cached_tokens[warm].sum() / result.input_tokens[warm].sum())
        slowest_s.append(np.quantile(result.ttft_s[warm], 0.99))
    assert np.mean(hits) > 0.94
    # Some draws of arrivals fill both queues by themselves.
    assert np.median(slowest_s) < 1.2


@BINDINGS
def test_a_slow_replica_is_not_used_for_its_memory(binding: str) -> None:
    result = run(3, binding, slowdowns=(10.0,))
    warm = result.arrival_s >= WARM_S
    assert (result.replica[warm] == 0).mean() < 0.02
