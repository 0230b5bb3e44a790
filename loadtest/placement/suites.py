"""Which cells make up an experiment, by name. Knows workloads, fleets and policies; runs nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cache.counted import counted
from loadtest.placement.errors import BadRequest
from loadtest.placement.policy_choice import PolicyChoice
from loadtest.simulation.cell import CellSpec, Failure, Scaling
from loadtest.simulation.machine import H100_8B, Machine
from loadtest.workloads.reference import WorkloadRef

TRACE_VARIABLE = "WARMPATH_TRACE"
EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_conversation_excerpt.jsonl.gz"


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What a comparison of policies holds fixed, but for the seed."""

    workload: str  # its label
    cache_tokens: int  # of one replica
    num_routers: int
    num_replicas: int
    load: float


@dataclass(frozen=True, slots=True)
class GridSpec:
    """Every combination of these is a cell."""

    workloads: tuple[WorkloadRef, ...]
    policies: tuple[PolicyChoice, ...]
    replicas: tuple[int, ...] = (4, 16, 64)
    loads: tuple[float, ...] = (0.6, 0.85, 1.05)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    cache_tokens: tuple[int, ...] = (1_500_000,)
    routers: tuple[int, ...] = (1,)
    event_delay_s: float = 0.005
    dispatch_delay_s: float = 0.001
    has_kv_events: bool = True
    slowdowns: tuple[float, ...] = ()  # of the first replicas; 1 for the others
    failures: tuple[Failure, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    machine: Machine = H100_8B

    def __post_init__(self) -> None:
        """Raises BadRequest for what some of its fleets do not have."""
        smallest = min(self.replicas)
        if len(self.slowdowns) > smallest:
            raise BadRequest(f"a fleet of {smallest} has no {counted(len(self.slowdowns), 'slow replica')}")
        for failure in self.failures:
            num_replicas = self._num_replicas(failure.at_s, smallest)
            if failure.replica >= num_replicas:
                raise BadRequest(
                    f"replica {failure.replica}, counted from 0, cannot die at {failure.at_s:g} s in a fleet "
                    f"of {num_replicas}"
                )

    def _num_replicas(self, at_s: float, at_first: int) -> int:
        """How large a fleet is then; who dies at the second of a scaling does so before it."""
        earlier = [scaling for scaling in self.scalings if scaling.at_s < at_s]
        earlier.sort(key=lambda scaling: scaling.at_s)  # of one second in the order given
        return earlier[-1].num_replicas if earlier else at_first

    def cells(self) -> list[tuple[Setting, PolicyChoice, CellSpec]]:
        """In the order to run them: all policies of one window one after another, since they share it.

        Ideals do not route, so what several routers know late means nothing to them: they run once.
        """
        found = []
        fleets = product(self.workloads, self.cache_tokens, self.replicas, self.loads, self.routers)
        for (workload, cache_tokens, num_replicas, load, num_routers), seed in product(fleets, self.seeds):
            setting = Setting(workload.label, cache_tokens, num_routers, num_replicas, load)
            for policy in self.policies:
                spec = CellSpec(
                    workload=workload,
                    num_replicas=num_replicas,
                    load=load,
                    seed=seed,
                    policy=policy.name,
                    policy_options=policy.options,
                    router_options=policy.router_settings,
                    cache_tokens=cache_tokens,
                    num_routers=1 if policy.is_ideal else num_routers,
                    event_delay_s=self.event_delay_s,
                    dispatch_delay_s=self.dispatch_delay_s,
                    has_kv_events=self.has_kv_events,
                    slowdowns=self.slowdowns,
                    failures=self.failures,
                    scalings=self.scalings,
                    machine=policy.machine_of(self.machine),
                )
                found.append((setting, policy, spec))
        return found


def default_trace() -> Path:
    """The trace `WARMPATH_TRACE` names, else the excerpt that comes with the project."""
    named = os.environ.get(TRACE_VARIABLE)
    return Path(named) if named else EXCERPT
