"""A hot prefix's copies are made beside requests: of those only the first one with the prefix computes it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from loadtest.simulation.cell import CellResult, Failure
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload, WorkRequest
from tests.fakes.simulation import BLOCK_TOKENS, spec, workload

PREFIX_BLOCKS = 8
PREFIX_TOKENS = PREFIX_BLOCKS * BLOCK_TOKENS  # 128 of them: 0.14 s
RATE_PER_S, DURATION_S = 12.0, 40.0
BINDINGS = pytest.mark.parametrize("binding", ["late", "at_once"])


def questions(seed: int) -> Workload:
    """One prefix, each time with a question of its own."""
    draw, arrival_s, requests = random.Random(seed), 0.0, []
    while arrival_s < DURATION_S:
        number = len(requests)
        own = PREFIX_BLOCKS + 2 * number
        blocks = (*range(PREFIX_BLOCKS), own, own + 1)
        requests.append(WorkRequest(arrival_s, PREFIX_TOKENS + BLOCK_TOKENS + 4, 12, blocks, number))
        arrival_s += draw.expovariate(RATE_PER_S)
    return workload(*requests)


def run(
    binding: str, *, copies_beside: bool, failures: tuple[Failure, ...] = (), seed: int = 1
) -> CellResult:
    cell = spec(
        policy="expected_time",
        policy_options=(("copies_beside", copies_beside),),
        num_replicas=4,
        seed=seed,
        router_options=(("binding", binding),),
        event_delay_s=0.001,
        failures=failures,
    )
    return simulate(questions(seed), cell)


def computed_whole(result: CellResult) -> int:
    """Requests that had the prefix to compute."""
    return int((result.cached_tokens < PREFIX_TOKENS).sum())


@pytest.mark.parametrize(
    "binding", ["late", pytest.param("at_once", marks=(pytest.mark.long, pytest.mark.broad))]
)
def test_requests_compute_it_once_and_are_sooner(binding: str) -> None:
    beside, by_requests = (
        [run(binding, copies_beside=each, seed=seed) for seed in range(3)] for each in (True, False)
    )
    assert all(len(set(result.replica.tolist())) == 4 for result in beside), "each replica has a copy"
    assert [computed_whole(result) for result in beside] == [1, 1, 1]
    assert all(computed_whole(result) == 4 for result in by_requests)
    assert _slowest_s(beside) < _slowest_s(by_requests)


def _slowest_s(results: list[CellResult]) -> float:
    return float(np.quantile(np.concatenate([result.ttft_s for result in results]), 0.99))


@BINDINGS
def test_every_request_is_answered_where_replicas_die_with_copies_on_their_way(binding: str) -> None:
    failures = tuple(Failure(at_s=0.05 * number, replica=number % 4, down_s=0.5) for number in range(1, 80))
    result = run(binding, copies_beside=True, failures=failures)
    assert (result.e2e_s > 0).all()
    assert result.num_retries
