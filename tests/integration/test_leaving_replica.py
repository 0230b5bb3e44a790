"""A replica leaves a fleet with two Routers, and all that it held is asked for at once, several times each.

The simulated cluster: nobody hears of what the other Router decides before an engine tells of it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cache.scheduling_order import SchedulingOrder
from loadtest.simulation.cell import Scaling
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, Blocks, request, spec, workload

NUM_PREFIXES, PREFIX_TOKENS, QUESTION_TOKENS = 9, 64 * BLOCK_TOKENS, 24
ASKED_EACH = 16  # at 10/s, before it leaves
LEAVES_AT_S = 0.1 * ASKED_EACH * NUM_PREFIXES
BURSTS = [4, 12]
STEPS = replace(
    MACHINE,
    base_s=0.008,
    per_token_s=2.4e-4,
    per_attention_s=1e-8,
    per_sequence_s=1e-3,
    max_batched_tokens=512,
    max_running=64,
    scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING,
)


def questions(seed: int, burst: int) -> tuple[Workload, list[int]]:
    """About the prefixes in turn, and a burst about each as the replica leaves; and what each is about."""
    blocks, rng = Blocks(), random.Random(seed)
    prefixes = [blocks.extend((), PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    asked = [(0.1 * number, number % NUM_PREFIXES) for number in range(ASKED_EACH * NUM_PREFIXES)]
    for about in range(NUM_PREFIXES):
        asked += [(LEAVES_AT_S + 0.003 + 0.05 * rng.random(), about) for _ in range(burst)]
    asked.sort()
    tokens = PREFIX_TOKENS + QUESTION_TOKENS
    requests = [
        request(at_s, tokens, 4, blocks.extend(prefixes[about], tokens), number)
        for number, (at_s, about) in enumerate(asked)
    ]
    return workload(*requests), [about for _, about in asked]


@pytest.mark.parametrize("binding", ["late", "at_once"])
@pytest.mark.parametrize("burst", BURSTS)
@pytest.mark.parametrize("seed", range(12))
def test_each_prefix_is_computed_once_more_however_many_go_to_one_heir(
    seed: int, burst: int, binding: str
) -> None:
    work, about = questions(seed, burst)
    cell = spec(
        policy="expected_time",
        num_replicas=3,
        num_routers=2,
        seed=seed,
        router_options=(("binding", binding),),
        cache_tokens=2 * NUM_PREFIXES * PREFIX_TOKENS,
        event_delay_s=0.004,
        dispatch_delay_s=0.002,
        machine=STEPS,
        scalings=(Scaling(LEAVES_AT_S, 2),),
    )
    result = simulate(work, cell)
    leaver = max(result.replica.tolist())
    is_before = result.arrival_s < LEAVES_AT_S
    homes = {about[index]: result.replica[index] for index in range(len(about)) if is_before[index]}
    left = {prefix for prefix, home in homes.items() if home == leaver}
    assert left, "it held some"
    computed = [
        about[index]
        for index in range(len(about))
        if not is_before[index] and about[index] in left and result.cached_tokens[index] < PREFIX_TOKENS
    ]
    assert sorted(computed) == sorted(left)
