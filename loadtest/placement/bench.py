"""`make bench-placement`: which comparisons the project reports, in parts. Knows suites; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.placement.comparison import Comparison
from loadtest.placement.policy_choice import ALL, OURS, PolicyChoice, parse_policies
from loadtest.placement.suites import GridSpec
from loadtest.placement.targets import (
    BASELINE,
    Target,
    adverse_targets,
    router_targets,
    sharing_targets,
)
from loadtest.workloads.reference import WorkloadRef
from router.policies import POLICIES

SEEDS = (0, 1, 2, 3, 4)

CONVERSATION = "conversation"
GENERATED = "generated"
HELD_OUT = "held-out"
ADVERSE = "adverse"
SURPLUS = "surplus"
ROUTERS = "routers"
TUNED = "tuned"
PARTS = (CONVERSATION, GENERATED, HELD_OUT, ADVERSE, SURPLUS, ROUTERS, TUNED)

# Every policy's best setting, as `python -m loadtest tune` found it.
TUNED_POLICIES = Path(__file__).parents[1] / "data" / "tuned_policies.txt"
TUNING_SEEDS = (141,)  # its window of the trace shares least with those of `SEEDS`
TUNING_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """What of the comparison to run."""

    is_full: bool
    parts: Sequence[str] | None  # None: all of them if full, else the conversation trace
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    purpose: str
    spec: GridSpec
    targets: Callable[[Comparison], Iterator[Target]]


def bench_specs(bench: Bench, trace: WorkloadRef) -> Iterator[Part]:
    """The parts in order of interest."""
    chosen = bench.parts or (PARTS if bench.is_full else (CONVERSATION,))
    for name in PARTS:
        if name in chosen:
            yield _part(name, bench, trace)


def _part(name: str, bench: Bench, trace: WorkloadRef) -> Part:
    everybody = tuple(parse_policies([ALL]))
    beside_baseline = tuple(parse_policies([BASELINE.label, *(ours.label for ours in OURS)]))
    whole = GridSpec(
        (trace,),
        everybody,
        replicas=(4, 16, 64) if bench.is_full else (4,),
        loads=(0.6, 0.85, 1.05) if bench.is_full else (0.6, 0.85),
        seeds=SEEDS if bench.is_full else SEEDS[:3],
        cache_tokens=(bench.cache_tokens,),
    )
    purpose, spec, targets = {
        CONVERSATION: ("every policy on the trace", whole, sharing_targets),
        GENERATED: (
            "every policy on generated traffic with something to share",
            _generated(whole, "system_prompts", "multi_turn", "agent_loops"),
            sharing_targets,
        ),
        HELD_OUT: (
            "every policy on traffic that nothing was tuned on",
            _generated(whole, "held_out"),
            sharing_targets,
        ),
        ADVERSE: (
            f"traffic on which prefix-aware routing can lose, beside {BASELINE.label}",
            replace(
                _generated(whole, "hot_prefix", "no_reuse", "decode_heavy"),
                policies=beside_baseline,
                loads=(0.6, 0.85),
            ),
            adverse_targets,
        ),
        SURPLUS: (
            f"far more replicas than the traffic needs, beside {BASELINE.label}",
            replace(_generated(whole, "multi_turn"), policies=beside_baseline, loads=(0.1, 0.2)),
            adverse_targets,
        ),
        ROUTERS: (
            "one, two and four routers that learn of each other's work from the engines alone",
            replace(whole, policies=beside_baseline, loads=(0.6, 0.85), routers=(1, 2, 4)),
            router_targets,
        ),
        TUNED: (
            "rivals with their knobs tuned on other windows of the trace, beside the default policy as it is",
            replace(whole, policies=_tuned()),
            sharing_targets,
        ),
    }[name]
    return Part(name, purpose, spec, targets)


def _tuned() -> tuple[PolicyChoice, ...]:
    """The default policy, rivals as tuned, and rivals that have nothing to tune."""
    ours = [choice.label for choice in OURS]
    without_knobs = [name for name, spec in POLICIES.items() if not spec.option_names]
    return tuple(parse_policies([*ours, f"@{TUNED_POLICIES}", *without_knobs]))


def tuning_spec(trace: WorkloadRef, policies: tuple[PolicyChoice, ...], cache_tokens: int) -> GridSpec:
    """Where knobs are tuned: windows of `trace`, one number of replicas, two loads, seeds not reported on."""
    return GridSpec(
        (trace,),
        policies,
        replicas=(TUNING_REPLICAS,),
        loads=(0.85, 1.05),
        seeds=TUNING_SEEDS,
        cache_tokens=(cache_tokens,),
    )


def _generated(whole: GridSpec, *names: str) -> GridSpec:
    return replace(whole, workloads=tuple(map(WorkloadRef, names)))
