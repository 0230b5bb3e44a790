"""One cell of an experiment: what to simulate, and what came out. Both are values.

A cell is named by everything that its result depends on, so that results can be kept, compared and resumed.
Knows names and numbers; knows neither events nor tables.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.counted import counted
from loadtest.simulation.machine import H100_8B, Machine
from loadtest.workloads.reference import WorkloadRef

IDEAL = "ideal"  # greedy least time to first token on one pooled cache, first come first served
IDEAL_SHORTEST = "ideal_shortest"  # the same, with the queue in the order that late binding uses
IDEAL_APART = "ideal_apart"  # as `ideal`, but each engine has a cache of its own
IDEAL_APART_SHORTEST = "ideal_apart_shortest"
IDEALS = (IDEAL, IDEAL_SHORTEST, IDEAL_APART, IDEAL_APART_SHORTEST)
IDEALS_APART = (IDEAL_APART, IDEAL_APART_SHORTEST)
IDEALS_SHORTEST = (IDEAL_SHORTEST, IDEAL_APART_SHORTEST)

# Another value makes finished cells unknown: raise it when the simulation computes something else.
RESULT_VERSION = 8

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica dies, and a new one with an empty cache may come in its place."""

    at_s: float
    replica: int  # index, from 0
    down_s: float = float("inf")  # until another takes its place

    def __post_init__(self) -> None:
        if self.at_s < 0 or self.down_s <= 0 or self.replica < 0:
            raise ValueError(f"{self} is not a failure: times and indices count from 0")


@dataclass(frozen=True, slots=True)
class Scaling:
    """The fleet changes its size: new replicas start empty; the newest drain and leave."""

    at_s: float
    num_replicas: int  # from then on

    def __post_init__(self) -> None:
        if self.at_s < 0 or self.num_replicas < 1:
            raise ValueError(f"{self} is not a scaling: a time from 0, to at least one replica")


@dataclass(frozen=True, slots=True)
class CellSpec:
    """Everything a simulation depends on. Same spec, same result, bit for bit."""

    workload: WorkloadRef
    num_replicas: int
    load: float  # of the rate at which the work left after a pooled cache's hits fills the replicas
    seed: int  # of the workload's window and of every draw
    policy: str = "expected_time"  # one of `router.policies.NAMES`, or of `IDEALS`
    policy_options: tuple[tuple[str, object], ...] = ()  # sorted by name, so that equal options are equal
    router_options: tuple[tuple[str, object], ...] = ()  # other `RouterConfig` fields, sorted; e.g. binding
    cache_tokens: int = 1_500_000  # of one replica
    num_routers: int = 1
    event_delay_s: float = 0.005  # from an engine's publication to every router
    dispatch_delay_s: float = 0.001  # from a router's decision to the engine
    has_kv_events: bool = True  # False: engines tell their load alone, and routers imitate their caches
    slowdowns: tuple[float, ...] = ()  # of the first replicas, which may be slower; 1 for the others
    failures: tuple[Failure, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    machine: Machine = H100_8B

    def __post_init__(self) -> None:
        for name, low in (("num_replicas", 1), ("num_routers", 1), ("cache_tokens", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)} is less than {low}")
        if not self.load > 0:
            raise ValueError(f"load = {self.load} is not above 0")
        for name in ("event_delay_s", "dispatch_delay_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} is negative")
        if len(self.slowdowns) > self.num_replicas or not all(slowdown > 0 for slowdown in self.slowdowns):
            raise ValueError(
                f"slowdowns = {self.slowdowns} do not fit {counted(self.num_replicas, 'replica')}"
            )
        for name in ("policy_options", "router_options"):
            if getattr(self, name) != tuple(sorted(getattr(self, name))):
                raise ValueError(f"{name} = {getattr(self, name)} are not sorted by name")

    def digest(self) -> str:
        """Names the cell in a store of results: with a trace's content where its workload is `as_it_is`."""
        return hashlib.sha256(f"{RESULT_VERSION} {self!r}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class CellResult:
    """What happened to each request, in order of arrival, and to each replica.

    Per request, shape (requests,); per replica, shape (replicas that ever were,).
    """

    arrival_s: Floats  # at the router
    ttft_s: Floats  # from there to the first token, waiting at the router included
    e2e_s: Floats  # from there to the last token
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints  # of the prompt, at first admission: the engine's count
    replica: Ints  # index of the one that computed the first token
    busy_s: Floats  # per replica: seconds in which it computed steps
    prefill_tokens: Ints  # per replica: prompt tokens computed
    num_events: int  # of the simulation
    num_preemptions: int
    num_retries: int  # requests sent again because their replica died
    load_1_rate_per_s: (
        float  # arrivals per second that load 1.0 means here; 0 if the caller gave the requests
    )

    @property
    def mean_ttft_s(self) -> float:
        return float(self.ttft_s.mean())

    def ttft_quantile_s(self, quantile: float) -> float:
        """quantile: 0.99 for the 99th percentile."""
        return float(np.quantile(self.ttft_s, quantile))

    @property
    def mean_e2e_s(self) -> float:
        return float(self.e2e_s.mean())

    @property
    def mean_tpot_s(self) -> float:
        """Mean over requests with two tokens or more; 0 if there are none."""
        several = self.output_tokens > 1
        gaps = (self.e2e_s - self.ttft_s)[several] / (self.output_tokens[several] - 1)
        return float(gaps.mean()) if len(gaps) else 0.0

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens taken from a cache, over all prompt tokens; 0 to 1."""
        return float(self.cached_tokens.sum() / self.input_tokens.sum())

    @property
    def imbalance(self) -> float:
        """Prompt tokens computed by the busiest replica, over the mean replica's; at least 1."""
        mean = self.prefill_tokens.mean()
        return float(self.prefill_tokens.max() / mean) if mean else 1.0

    @property
    def makespan_s(self) -> float:
        """From time 0 to the last token of all."""
        return float((self.arrival_s + self.e2e_s).max())
