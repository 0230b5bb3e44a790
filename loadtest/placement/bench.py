"""`make bench-placement`: which comparisons the project reports, in parts. Knows suites; runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.placement.policy_choice import ALL, DEFAULT, PolicyChoice, parse_policies
from loadtest.placement.suites import GridSpec
from loadtest.workloads.reference import WorkloadRef

FULL_REQUESTS = 4_000
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
TUNING_SEEDS = (100,)  # not among `SEEDS`
TUNING_REPLICAS = 16

BASELINE = "power_of_two"  # what the adverse suite is measured against


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


def bench_specs(bench: Bench, trace: WorkloadRef) -> Iterator[Part]:
    """The parts in order of interest."""
    chosen = bench.parts or (PARTS if bench.is_full else (CONVERSATION,))
    for name in PARTS:
        if name in chosen:
            yield _part(name, bench, trace)


def _part(name: str, bench: Bench, trace: WorkloadRef) -> Part:
    everybody = tuple(parse_policies([ALL]))
    beside_baseline = tuple(parse_policies([BASELINE, DEFAULT, f"{DEFAULT}+late"]))
    whole = GridSpec(
        (replace(trace, num_requests=FULL_REQUESTS),),
        everybody,
        replicas=(4, 16, 64) if bench.is_full else (4, 16),
        loads=(0.6, 0.85, 1.05) if bench.is_full else (0.6, 0.85),
        seeds=SEEDS if bench.is_full else SEEDS[:3],
        cache_tokens=(bench.cache_tokens,),
    )
    if name == CONVERSATION:
        return Part(name, "every policy on the trace", whole)
    if name == GENERATED:
        return Part(
            name,
            "every policy on generated traffic with something to share",
            _generated(whole, "system_prompts", "multi_turn", "agent_loops"),
        )
    if name == HELD_OUT:
        return Part(name, "every policy on traffic that nothing was tuned on", _generated(whole, "held_out"))
    if name == ADVERSE:
        adverse = _generated(whole, "hot_prefix", "no_reuse", "decode_heavy")
        return Part(
            name,
            f"traffic on which prefix-aware routing can lose, beside {BASELINE}",
            replace(adverse, policies=beside_baseline, loads=(0.6, 0.85)),
        )
    if name == SURPLUS:
        surplus = _generated(whole, "multi_turn")
        return Part(
            name,
            f"far more replicas than the traffic needs, beside {BASELINE}",
            replace(surplus, policies=beside_baseline, loads=(0.1, 0.2)),
        )
    if name == TUNED:
        tuned = tuple(parse_policies([f"{DEFAULT}", f"@{TUNED_POLICIES}"]))
        return Part(
            name,
            "every policy with its knobs tuned on other windows of the trace, and the default one as it is",
            replace(whole, policies=tuned),
        )
    assert name == ROUTERS
    return Part(
        name,
        "one, two and four routers that learn of each other's work from the engines alone",
        replace(whole, policies=beside_baseline, loads=(0.6, 0.85), routers=(1, 2, 4)),
    )


def tuning_spec(trace: WorkloadRef, policies: tuple[PolicyChoice, ...], cache_tokens: int) -> GridSpec:
    """Where knobs are tuned: one number of replicas, two loads, seeds that are not reported on."""
    return GridSpec(
        (replace(trace, num_requests=FULL_REQUESTS),),
        policies,
        replicas=(TUNING_REPLICAS,),
        loads=(0.85, 1.05),
        seeds=TUNING_SEEDS,
        cache_tokens=(cache_tokens,),
    )


def _generated(whole: GridSpec, *names: str) -> GridSpec:
    return replace(whole, workloads=tuple(WorkloadRef(name, num_requests=FULL_REQUESTS) for name in names))
