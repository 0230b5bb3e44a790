"""The simulation's laws: jumping changes nothing, every token is accounted for, equal cells agree."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulation.cell import IDEAL, IDEAL_SHORTEST, CellResult, CellSpec, Failure, Scaling
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload
from tests.fakes_simulation import BLOCK_TOKENS, MACHINE, spec, workloads


@st.composite
def specs(draw: st.DrawFn, *, faults: bool = True) -> CellSpec:
    num_replicas = draw(st.integers(1, 3))
    times = st.floats(0.0, 6.0)
    return spec(
        num_replicas=num_replicas,
        seed=draw(st.integers(0, 3)),
        policy=draw(st.sampled_from(["round_robin", "expected_time"])),
        router_options=draw(st.sampled_from([(), (("binding", "late"),)])),
        # The largest request of a workload is 550 tokens; two of them do not fit at once.
        cache_tokens=BLOCK_TOKENS * draw(st.integers(40, 80)),
        num_routers=draw(st.integers(1, 3)),
        event_delay_s=draw(st.sampled_from([0.0, 0.05])),
        dispatch_delay_s=draw(st.sampled_from([0.0, 0.01])),
        slowdowns=draw(st.sampled_from([(), (1.5,)])),
        failures=tuple(
            Failure(draw(times), draw(st.integers(0, 2)), draw(st.floats(0.1, 2.0)))
            for _ in range(draw(st.integers(0, 2)) if faults else 0)
        ),
        scalings=tuple(
            Scaling(draw(times), draw(st.integers(1, 4)))
            for _ in range(draw(st.integers(0, 2)) if faults else 0)
        ),
    )


def assert_same(left: CellResult, right: CellResult, *, but: frozenset[str] = frozenset()) -> None:
    """Bit for bit."""
    for field in fields(CellResult):
        if field.name not in but:
            np.testing.assert_array_equal(
                getattr(left, field.name), getattr(right, field.name), err_msg=field.name
            )


@given(workloads(), specs())
@settings(max_examples=80, deadline=None)
def test_many_steps_at_once_give_what_single_steps_give(work: Workload, cell: CellSpec) -> None:
    """Every time, to the last bit: heartbeats, arrivals, failures and drains fall between the same steps."""
    single = simulate(work, cell, jumps=False)
    assert_same(simulate(work, cell), single, but=frozenset({"num_events"}))


@given(workloads(), specs(), st.sampled_from([IDEAL, IDEAL_SHORTEST]))
@settings(max_examples=40, deadline=None)
def test_the_ideals_jump_as_exactly(work: Workload, cell: CellSpec, policy: str) -> None:
    ideal = spec(
        policy=policy,
        num_replicas=cell.num_replicas,
        cache_tokens=cell.cache_tokens,
        slowdowns=cell.slowdowns,
    )
    single = simulate(work, ideal, jumps=False)
    assert_same(simulate(work, ideal), single, but=frozenset({"num_events"}))


@given(workloads(), specs())
@settings(max_examples=40, deadline=None)
def test_the_same_cell_gives_the_same_result(work: Workload, cell: CellSpec) -> None:
    assert_same(simulate(work, cell), simulate(work, cell))


@given(workloads(), specs(faults=False))
@settings(max_examples=60, deadline=None)
def test_every_prompt_token_is_cached_or_computed(work: Workload, cell: CellSpec) -> None:
    result = simulate(work, cell)
    uncached = int((result.input_tokens - result.cached_tokens).sum())
    computed = int(result.prefill_tokens.sum())
    if result.num_preemptions:
        assert computed >= uncached - len(work.requests) * BLOCK_TOKENS
    else:
        assert computed == uncached
    assert (result.cached_tokens < result.input_tokens).all()
    assert (result.cached_tokens % work.block_tokens == 0).all()


@given(workloads(), specs())
@settings(max_examples=60, deadline=None)
def test_time_is_what_the_steps_take(work: Workload, cell: CellSpec) -> None:
    """No token before its prefill alone could have made it; nobody is busy longer than the run."""
    result = simulate(work, cell)
    fastest = MACHINE.step_time()
    for index, request in enumerate(work.requests):
        uncached = int(result.input_tokens[index] - result.cached_tokens[index])
        alone_s = fastest.prefill_s(uncached, int(result.cached_tokens[index]), MACHINE.max_batched_tokens)
        assert result.ttft_s[index] >= alone_s + cell.dispatch_delay_s - 1e-9
        decode_s = (request.output_tokens - 1) * fastest.step_s(1, request.input_tokens, 1)
        assert result.e2e_s[index] >= result.ttft_s[index] + decode_s - 1e-9
    assert (result.busy_s <= result.makespan_s + 1e-9).all()
