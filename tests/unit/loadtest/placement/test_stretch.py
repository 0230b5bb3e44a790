"""The busiest stretch of a trace is the one with the most work per second, by hand and against all others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.placement.stretch import Stretch, busiest
from loadtest.simulation.machine import H100_8B
from loadtest.simulation.saturation import work_by_request
from loadtest.workloads.request import Workload, WorkRequest
from tests.fakes.simulation import BLOCK_TOKENS, Blocks, unrelated


def found(trace: Workload, num_requests: int, cache_tokens: int = 1_000_000) -> Stretch:
    return busiest(trace, num_requests, cache_tokens=cache_tokens, machine=H100_8B)


def test_what_came_before_it_is_cut_with_it() -> None:
    times = [*(60.0 * number for number in range(20)), *(1200.0 + number for number in range(14)), 9000.0]
    trace = unrelated(*((time_s, 600, 4) for time_s in times))
    stretch = found(trace, 14)
    assert (stretch.first, stretch.num_requests) == (20, 14)
    assert (stretch.began_s, stretch.duration_s) == (1200.0, 13.0)
    assert stretch.num_warming == 2  # with them an eighth of the requests, as in a comparison
    whole = stretch.cut(trace)
    assert [request.arrival_s for request in whole.requests[:3]] == [0.0, 60.0, 120.0]
    assert len(whole.requests) == 16


@pytest.mark.parametrize("num_requests", [3, 4])
def test_of_a_short_trace_it_is_all(num_requests: int) -> None:
    trace = unrelated((5.0, 600, 4), (6.0, 600, 4), (9.0, 600, 4))
    stretch = found(trace, num_requests)
    assert (stretch.first, stretch.num_requests, stretch.num_warming) == (0, 3, 0)
    assert [request.arrival_s for request in stretch.cut(trace).requests] == [0.0, 1.0, 4.0]


def test_long_prompts_outweigh_more_short_ones() -> None:
    short = [(0.1 * number, 100, 4) for number in range(10)]
    long = [(10.0 + number, 10_000, 4) for number in range(10)]
    assert found(unrelated(*short, *long), 10).first == 10


def test_long_answers_count_as_work() -> None:
    short = [(0.5 * number, 100, 2) for number in range(10)]
    long = [(10.0 + number, 100, 500) for number in range(10)]
    assert found(unrelated(*short, *long), 10).first == 10


def asked_again(num_blocks: int) -> Workload:
    """One prompt ten times, twice a second, then ten new ones, once a second."""
    blocks = Blocks()
    size = num_blocks * BLOCK_TOKENS
    known = blocks.extend((), size)
    arrivals = [0.5 * number for number in range(10)] + [10.0 + number for number in range(10)]
    chains = [known] * 10 + [blocks.extend((), size) for _ in range(10)]
    requests = [
        WorkRequest(arrival_s, size, 2, chain, session)
        for session, (arrival_s, chain) in enumerate(zip(arrivals, chains, strict=True))
    ]
    return Workload("again", BLOCK_TOKENS, tuple(requests))


@pytest.mark.parametrize(("cache_blocks", "first"), [(400, 10), (100, 0)])
def test_what_caches_hold_is_no_work(cache_blocks: int, first: int) -> None:
    """Unless they are too small for it."""
    assert found(asked_again(200), 10, cache_blocks * BLOCK_TOKENS).first == first


def test_of_stretches_at_one_instant_it_is_the_one_with_more_work() -> None:
    stretch = found(unrelated(*[(0.0, 100, 4)] * 3, *[(5.0, 200, 4)] * 3, (6.0, 50_000, 4)), 3)
    assert (stretch.first, stretch.duration_s, stretch.engines) == (3, 0.0, math.inf)


ARRIVALS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 4_000), st.integers(1, 300)), min_size=2, max_size=12
)


@given(gaps=ARRIVALS, num_requests=st.integers(2, 6))
def test_no_other_stretch_has_more_work_per_second(
    gaps: Sequence[tuple[int, int, int]], num_requests: int
) -> None:
    time_s, rows = 0.0, []
    for gap_s, inputs, outputs in gaps:
        time_s += gap_s
        rows.append((time_s, inputs, outputs))
    trace = unrelated(*rows)
    work_s = work_by_request(trace, num_replicas=1, cache_tokens=1_000_000, machine=H100_8B)
    stretch = found(trace, num_requests)
    length = min(num_requests, len(rows))
    assert stretch.num_requests == length
    for first in range(len(rows) - length + 1):
        engines = sum(work_s[first : first + length]) / (rows[first + length - 1][0] - rows[first][0])
        assert engines <= stretch.engines * (1 + 1e-9)
