"""From a cell's name to its result: the workload at its load, and the cluster over it.

Knows which cluster belongs to which policy; simulates nothing itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from cache.errors import ConfigError
from cache.scheduling_order import SchedulingOrder
from loadtest.simulation.cell import IDEALS, CellResult, CellSpec
from loadtest.simulation.cluster import Cluster
from loadtest.simulation.ideal import IdealCluster
from loadtest.simulation.machine import Machine
from loadtest.simulation.saturation import saturation_rate_per_s
from loadtest.workloads.load import LoadedWorkload, at_load
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload


def run_cell(spec: CellSpec) -> CellResult:
    """Simulate one cell. Deterministic: the same spec and trace give the same result, bit for bit.

    Raises ConfigError for an unknown policy or option, WorkloadError for a trace that cannot be read or
    brought to that load.
    """
    # The window depends on the work there is, not on its order: found once for all of them.
    machine = replace(spec.machine, scheduling_order=SchedulingOrder.FIRST_COME)
    loaded = loaded_workload(
        spec.workload, spec.load, spec.seed, spec.num_replicas, spec.cache_tokens, machine
    )
    return simulate(loaded.workload, spec, load_1_rate_per_s=loaded.saturation_per_s)


def simulate(
    workload: Workload, spec: CellSpec, *, load_1_rate_per_s: float = 0.0, jumps: bool = True
) -> CellResult:
    """Simulate these requests, whatever `spec` says of workload and load. jumps: as `SimEngine` has it.

    Raises ConfigError for an unknown policy or option, or a cache or a machine that the largest request does
    not fit.
    """
    largest = max((r.input_tokens + r.output_tokens for r in workload.requests), default=0)
    if largest > spec.cache_tokens // workload.block_tokens * workload.block_tokens:
        raise ConfigError("cache_tokens", spec.cache_tokens, f"the largest request takes {largest} tokens")
    longest, limit = max((r.input_tokens for r in workload.requests), default=0), spec.machine.max_model_len
    if longest >= limit:
        raise ConfigError("machine.max_model_len", limit, f"the longest prompt has {longest} tokens")
    cluster = IdealCluster if spec.policy in IDEALS else Cluster
    return cluster(workload, spec, jumps=jumps).run(load_1_rate_per_s)


# One after another, the policies of a grid see the same window: made once per process, not per policy.
@lru_cache(maxsize=4)
def loaded_workload(
    reference: WorkloadRef, load: float, seed: int, num_replicas: int, cache_tokens: int, machine: Machine
) -> LoadedWorkload:
    """The window that these policies are compared on."""
    saturation = partial(
        saturation_rate_per_s, num_replicas=num_replicas, cache_tokens=cache_tokens, machine=machine
    )
    return at_load(reference.open(), load, saturation, num_requests=reference.num_requests, seed=seed)
