"""From a cell's name to its result: which window, at which rate."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.simulation.cell import CellSpec
from loadtest.simulation.run import loaded_workload, run_cell
from loadtest.simulation.saturation import saturation_rate_per_s
from loadtest.workloads.generators import GENERATORS
from loadtest.workloads.reference import WorkloadRef

CELL = CellSpec(
    WorkloadRef(next(iter(GENERATORS)), num_requests=150),
    num_replicas=4,
    load=0.7,
    seed=3,
    policy="expected_time",
)


def test_a_cell_runs_at_its_load() -> None:
    result = run_cell(CELL)
    assert len(result.ttft_s) == 150
    rate = 149 / (result.arrival_s[-1] - result.arrival_s[0])
    assert rate / result.load_1_rate_per_s == pytest.approx(0.7, rel=0.05)


def test_policies_are_compared_on_the_same_window() -> None:
    arguments = (CELL.workload, CELL.load, CELL.seed, CELL.num_replicas, CELL.cache_tokens, CELL.machine)
    loaded = loaded_workload(*arguments)
    assert loaded_workload(*arguments) is loaded
    assert run_cell(CELL).arrival_s.tolist() == [r.arrival_s for r in loaded.workload.requests]
    assert loaded.saturation_per_s == pytest.approx(
        saturation_rate_per_s(
            loaded.workload, num_replicas=4, cache_tokens=CELL.cache_tokens, machine=CELL.machine
        )
    )


def test_a_cell_is_the_same_every_time() -> None:
    np.testing.assert_array_equal(run_cell(CELL).ttft_s, run_cell(CELL).ttft_s)
