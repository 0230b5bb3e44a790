"""The simulation's laws: jumping changes nothing, every token is accounted for, equal cells agree."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulation.cell import IDEALS, CellResult, CellSpec, Failure, Scaling
from loadtest.simulation.real_fleet import token_ids
from loadtest.simulation.run import simulate
from loadtest.workloads.request import Workload
from replica.config import SimConfig
from tests.fakes.engine import VirtualClock, make_request, sim_core
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, spec, workloads


@st.composite
def specs(draw: st.DrawFn, *, faults: bool = True) -> CellSpec:
    num_replicas = draw(st.integers(1, 3))
    times = st.floats(0.0, 6.0)
    return spec(
        num_replicas=num_replicas,
        seed=draw(st.integers(0, 3)),
        policy=draw(st.sampled_from(["round_robin", "expected_time"])),
        router_options=(("binding", draw(st.sampled_from(["at_once", "late"]))),),
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
@settings(max_examples=40)
def test_many_steps_at_once_give_what_single_steps_give(work: Workload, cell: CellSpec) -> None:
    """Every time, to the last bit: heartbeats, arrivals, failures and drains fall between the same steps."""
    single = simulate(work, cell, jumps=False)
    assert_same(simulate(work, cell), single, but=frozenset({"num_events"}))


@given(
    workloads(),
    specs(),
    st.integers(1, 18),
    st.floats(5.0, 40.0),
    st.sampled_from([(), (3.0,)]),
    st.sampled_from([0.0, 0.05, 2.0]),
)
@settings(max_examples=40)
def test_heartbeats_of_an_empty_fleet_may_be_left_out(
    work: Workload,
    cell: CellSpec,
    first: int,
    gap_s: float,
    slowdowns: tuple[float, ...],
    event_delay_s: float,
) -> None:
    """The fleet changes in the gap, a slow replica is to be tried again after it, routers hear late of all:
    every time is what it is with all heartbeats."""
    late = tuple(
        replace(one, arrival_s=one.arrival_s + (gap_s if index >= first else 0.0))
        for index, one in enumerate(work.requests)
    )
    gapped = replace(work, requests=late)
    slow = replace(cell, slowdowns=slowdowns, event_delay_s=event_delay_s)
    single = simulate(gapped, slow, jumps=False)
    assert_same(simulate(gapped, slow), single, but=frozenset({"num_events"}))


@given(workloads(), specs(), st.sampled_from(IDEALS))
@settings(max_examples=40)
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
@settings(max_examples=40)
def test_the_same_cell_gives_the_same_result(work: Workload, cell: CellSpec) -> None:
    assert_same(simulate(work, cell), simulate(work, cell))


@given(workloads(), specs(faults=False))
@settings(max_examples=40)
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
@settings(max_examples=40)
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


@given(workloads(), st.integers(40, 80))
@settings(max_examples=40)
def test_one_replica_is_production_s_engine_on_its_simulated_runner(work: Workload, num_blocks: int) -> None:
    """Token by token in real ids, hashes and pages there, by block ids here: the same times and hits."""
    strangers = replace(
        work, requests=tuple(replace(one, session=number) for number, one in enumerate(work.requests))
    )
    cell = spec(num_replicas=1, cache_tokens=num_blocks * BLOCK_TOKENS)
    simulated = simulate(strangers, cell)
    first_s, last_s, cached = served_by_engine_core(strangers, num_blocks)
    np.testing.assert_allclose(simulated.arrival_s + simulated.ttft_s, first_s, rtol=1e-9)
    np.testing.assert_allclose(simulated.arrival_s + simulated.e2e_s, last_s, rtol=1e-9)
    assert simulated.cached_tokens.tolist() == cached


def served_by_engine_core(work: Workload, num_blocks: int) -> tuple[list[float], list[float], list[int]]:
    """When each request got its first and last token, and its hit; what came is taken in between steps."""
    clock = VirtualClock()
    core = sim_core(
        num_blocks,
        clock=clock,
        sim=SimConfig(
            base_s=MACHINE.base_s,
            per_token_s=MACHINE.per_token_s,
            per_attention_s=MACHINE.per_attention_s,
            per_sequence_s=MACHINE.per_sequence_s,
        ),
        block_size=BLOCK_TOKENS,
        max_batched_tokens=MACHINE.max_batched_tokens,
        max_running=MACHINE.max_running,
        itl_target_s=MACHINE.itl_target_s,
        scheduling_order=MACHINE.scheduling_order.value,
    )
    first_s, last_s, cached = ([0.0] * len(work.requests) for _ in range(3))
    coming = list(enumerate(work.requests))
    core_was_busy = False
    while coming or core.has_work:
        due = [item for item in coming if item[1].arrival_s <= clock.now_s and core_was_busy]
        if not core.has_work and not due:  # an idle engine starts with whoever comes first, alone
            due = coming[:1]
            clock.now_s = due[0][1].arrival_s
        del coming[: len(due)]
        for index, one in due:
            prompt = token_ids(one, BLOCK_TOKENS, 1000)
            core.submit(
                make_request(str(index), prompt, max_tokens=one.output_tokens, ignore_eos=True, seed=index)
            )
        core_was_busy = True
        for progress in core.step():
            index = int(progress.request.request_id)
            if progress.request.num_output_tokens == 1:
                first_s[index] = clock.now_s
            last_s[index] = clock.now_s
            cached[index] = progress.request.cached_tokens or 0
    return first_s, last_s, [int(tokens) for tokens in cached]
