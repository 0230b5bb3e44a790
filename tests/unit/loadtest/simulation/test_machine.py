"""The machine's constants: checked, scaled, printed, and found by the engine's own fit."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.scheduling_order import SchedulingOrder
from loadtest.simulation.machine import H100_8B, Machine, MachineWithHost, SharedMachine
from replica.scheduling.step_time import StepTimeFit, attention_pairs


def test_a_slower_replica_is_slower_in_every_term() -> None:
    model = H100_8B.step_time(2.0)
    assert model.step_s(100, 5000.0, 3) == pytest.approx(2 * H100_8B.step_time().step_s(100, 5000.0, 3))
    assert model.base_s == 2 * H100_8B.base_s


def test_the_report_prints_every_constant() -> None:
    assert H100_8B.describe() == (
        "step = 6.5 ms + 32 us/token + 1.4 ns/(query, key) + 0.6 ms/sequence;"
        " at most 8192 tokens and 256 sequences a step"
    )


MACHINES = st.fixed_dictionaries(
    {
        "base_s": st.sampled_from((0.0065, 0.0065000001, 0.0041)),
        "per_token_s": st.sampled_from((32e-6, 32.0001e-6)),
        "per_attention_s": st.sampled_from((1.4e-9, 0.0)),
        "per_sequence_s": st.sampled_from((0.6e-3, 0.7e-3)),
        "max_batched_tokens": st.sampled_from((8192, 2048)),
        "max_running": st.sampled_from((256, 255)),
        "max_model_len": st.sampled_from((1 << 18, 1 << 17)),
        "scheduling_order": st.sampled_from(SchedulingOrder),
        "itl_target_s": st.sampled_from((math.inf, None, 0.05)),
    }
)
KINDS = st.one_of(
    st.builds(lambda changes: Machine(**changes), MACHINES),
    st.builds(
        lambda changes, blocks, copy_s: MachineWithHost(**changes, host_blocks=blocks, copy_block_s=copy_s),
        MACHINES,
        st.sampled_from((65_536, 1)),
        st.sampled_from((0.1e-3, 0.2e-3)),
    ),
    st.builds(
        lambda changes, engines: SharedMachine(**changes, num_engines=engines),
        MACHINES,
        st.sampled_from((1.0, 1.0000001)),
    ),
)


@given(KINDS, KINDS)
def test_machines_that_differ_are_told_apart(one: Machine, other: Machine) -> None:
    assert (one.describe() == other.describe()) == (one == other)


def test_what_differs_from_the_default_is_named() -> None:
    told = MachineWithHost(max_model_len=4096, itl_target_s=None).describe()
    assert told.endswith(
        "; max_model_len = 4096, itl_target_s = None, host_blocks = 65536, copy_block_s = 0.0001"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"base_s": -1.0}, "base_s"),
        ({"per_attention_s": float("nan")}, "per_attention_s"),
        ({"max_running": 0}, "max_running"),
        ({"base_s": 0.0, "per_token_s": 0.0}, "no time"),
    ],
)
def test_an_impossible_machine_is_refused_by_name(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Machine(**changes)  # type: ignore[arg-type]  # floats, some where whole numbers belong


def test_the_engines_fit_finds_the_machine() -> None:
    """Why the simulated replicas may publish their model from the start: a real one would learn the same."""
    rng, fit, machine = random.Random(0), StepTimeFit(), H100_8B.step_time()
    for _ in range(400):
        decodes = [rng.randrange(1000, 20_000) for _ in range(rng.randrange(0, 40))]
        chunks = [(rng.randrange(0, 20_000), rng.randrange(1, 8192))] if rng.random() < 0.3 else []
        work = [(context, 1) for context in decodes] + chunks
        if not work:
            continue
        new_tokens = sum(new for _, new in work)
        attention = sum(attention_pairs(start, new) for start, new in work)
        fit.observe(
            new_tokens=new_tokens,
            attention=attention,
            sequences=len(work),
            elapsed_s=machine.step_s(new_tokens, attention, len(work)),
        )
    found = fit.model()
    assert found is not None
    for context, new, sequences in ((0, 8192, 1), (12_000, 1, 20), (50_000, 4096, 10)):
        attention = attention_pairs(context, new)
        expected = machine.step_s(new, attention, sequences)
        assert found.step_s(new, attention, sequences) == pytest.approx(expected, rel=0.02)
