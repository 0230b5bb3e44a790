"""What brings first tokens sooner, each with and without: generated traffic on four simulated cards."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cache.scheduling_order import SchedulingOrder
from loadtest.simulation.cell import CellSpec
from loadtest.simulation.machine import H100_8B
from loadtest.simulation.run import run_cell
from loadtest.workloads.reference import WorkloadRef
from replica.scheduling.early_end import EarlyEnd
from router.pricing.step_clock import StepClock

pytestmark = [pytest.mark.long, pytest.mark.broad]

BINDINGS = pytest.mark.parametrize("binding", ["late", "at_once"])


def mean_ttft_s(workload: str, binding: str, *, num_requests: int, load: float, seeds: range) -> float:
    """Geometric mean over the seeds, of what ships."""
    reference = WorkloadRef(workload, num_requests=num_requests)
    machine = replace(H100_8B, scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
    options = (("binding", binding),)
    cells = [
        CellSpec(reference, 4, load, seed, "expected_time", router_options=options, machine=machine)
        for seed in seeds
    ]
    return float(np.exp(np.mean([math.log(run_cell(cell).mean_ttft_s) for cell in cells])))


@BINDINGS
def test_steps_that_end_early(binding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of agents behind the long prompts of others."""

    def measure() -> float:
        return mean_ttft_s("agent_loops", binding, num_requests=600, load=0.6, seeds=range(2))

    ends_early_s = measure()
    monkeypatch.setattr(EarlyEnd, "is_before", lambda self, start, num_tokens: False)
    assert ends_early_s < 0.95 * measure()


@BINDINGS
def test_decisions_that_ask_when_a_step_ends(binding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts behind shared ones, which wait for little else."""

    def measure() -> float:
        return mean_ttft_s("system_prompts", binding, num_requests=2000, load=0.85, seeds=range(1))

    asks_s = measure()
    monkeypatch.setattr(StepClock, "begins", lambda self, first_s, step_s, now: None)
    assert asks_s < 0.97 * measure()
