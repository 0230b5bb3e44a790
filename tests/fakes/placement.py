"""Cells without a simulation: results worked out from the spec, for the grid and what comes after it.

Importable by name, so that they run in the grid's worker processes too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from loadtest.simulation.cell import CellResult, CellSpec
from loadtest.workloads.reference import WorkloadRef

WORKLOAD = WorkloadRef("no_reuse", num_requests=16)
BASE_S = {"ideal": 1.0, "expected_time": 1.1, "power_of_two": 1.5, "round_robin": 2.0}
TRACE_LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
LOG_VARIABLE = "FAKE_CELLS_LOG"  # a file that gets one line per cell that ran


def fake_spec(
    policy: str = "expected_time", *, seed: int = 0, replicas: int = 4, load: float = 0.5
) -> CellSpec:
    return CellSpec(WORKLOAD, replicas, load, seed, policy)


def fake_result(spec: CellSpec) -> CellResult:
    """Times to first token depend on policy, load and seed; half of each prompt is cached."""
    count = spec.workload.num_requests
    ttft_s = np.full(count, BASE_S[spec.policy] * spec.load * (1.0 + 0.01 * spec.seed))
    inputs = np.full(count, 1000)
    return CellResult(
        arrival_s=np.arange(count, dtype=np.float64),
        ttft_s=ttft_s,
        e2e_s=ttft_s + 1.0,
        input_tokens=inputs,
        output_tokens=np.full(count, 11),
        cached_tokens=inputs // 2,
        replica=np.arange(count) % spec.num_replicas,
        busy_s=np.ones(spec.num_replicas),
        prefill_tokens=np.full(spec.num_replicas, 500),
        num_events=count,
        num_preemptions=0,
        num_retries=0,
        load_1_rate_per_s=1.0 / spec.load,
    )


def run_fake(spec: CellSpec) -> CellResult:
    log = os.environ.get(LOG_VARIABLE)
    if log is not None:
        with Path(log).open("a") as file:
            file.write(f"{spec.policy} {spec.seed}\n")
    return fake_result(spec)


def run_but_fail_for_seed_1(spec: CellSpec) -> CellResult:
    if spec.seed == 1:
        raise RuntimeError("seed 1 is not liked")
    return run_fake(spec)


def run_but_die_for_seed_1(spec: CellSpec) -> CellResult:
    if spec.seed == 1:
        os._exit(9)
    return run_fake(spec)


def run_while_it_is_recorded(spec: CellSpec) -> CellResult:
    """The trace has one line more before the process has read it."""
    with Path(spec.workload.source).open("a") as file:
        file.write(TRACE_LINE % 6_000)
    spec.workload.open()
    return run_fake(spec)


def run_slowly(spec: CellSpec) -> CellResult:
    time.sleep(0.3)
    return run_fake(spec)


def die(*_: object) -> None:
    """As a process does that is killed for its memory."""
    os._exit(9)
