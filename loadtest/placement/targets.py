"""What the project set out to reach in placement, and what was measured. Knows comparisons and limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cache.counted import counted
from loadtest.placement.comparison import Comparison, Measure, mean_ttft_s, p99_ttft_s
from loadtest.placement.policy_choice import DEFAULT, OURS, PolicyChoice
from loadtest.placement.suites import Setting
from loadtest.simulation.cell import IDEAL
from loadtest.text_table import TextTable

AT_ONCE = tuple(choice for choice in OURS if not choice.is_late)
LATE = tuple(choice for choice in OURS if choice.is_late)
THE_IDEAL = PolicyChoice(IDEAL)

IDEAL_LIMIT = 1.07  # mean time to first token over the ideal's, dispatch at once
LATE_LIMITS = {0.6: 1.02, 0.85: 0.95}  # the same with late binding, by load
OVERLOAD = 1.05
OVERLOAD_LIMIT = 1.10  # over the best rival, mean over seeds, with a small cache
SMALL_CACHE_TOKENS = 400_000
BASELINE = PolicyChoice("power_of_two")
BASELINE_LIMIT = 1.02  # mean and p99 over the baseline's, on traffic where prefix-aware routing can lose
ROUTERS_LIMIT = 1.02  # two routers over one


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    required: str
    measured: str
    is_reached: bool


def targets_table(found: list[Target]) -> TextTable:
    rows = [(t.what, t.required, t.measured, "reached" if t.is_reached else "missed") for t in found]
    num_reached = sum(target.is_reached for target in found)
    return TextTable(
        f"Targets: {num_reached} of {len(found)} reached", ("target", "required", "measured", ""), tuple(rows)
    )


def sharing_targets(comparison: Comparison) -> Iterator[Target]:
    """Of traffic with something to share: near the ideal, and ahead of every rival."""
    for ours in _present(comparison, AT_ONCE):
        what = f"mean over the ideal's, at once, {ours.label}"
        yield _at_most(what, comparison, ours, THE_IDEAL, mean_ttft_s, IDEAL_LIMIT)
    for load, limit in LATE_LIMITS.items():
        part = comparison.only(partial(_is_at_load, load))
        for ours in _present(part, LATE) if part.settings else ():
            what = f"the same at load {load:g}, {ours.label}"
            yield _at_most(what, part, ours, THE_IDEAL, mean_ttft_s, limit)
    yield from _rival_targets(comparison)
    yield from _overload_targets(comparison)


def adverse_targets(comparison: Comparison) -> Iterator[Target]:
    """Of traffic on which prefix-aware routing can lose: never behind the baseline, on any workload."""
    for workload in sorted({setting.workload for setting in comparison.settings}):
        part = comparison.only(partial(_is_of_workload, workload))
        for ours in _present(comparison, OURS):
            for name, measure in (("mean", mean_ttft_s), ("p99", p99_ttft_s)):
                what = f"{workload}: {name} over {BASELINE.label}'s, {ours.label}"
                yield _at_most(what, part, ours, BASELINE, measure, BASELINE_LIMIT)


def router_targets(comparison: Comparison) -> Iterator[Target]:
    for ours in _present(comparison, OURS):
        ratio = comparison.beside_one_router(ours, 2, mean_ttft_s)
        if ratio is not None:
            what = f"mean with two routers over one, {ours.label}"
            yield Target(what, f"<= {ROUTERS_LIMIT}", str(ratio), ratio.estimate <= ROUTERS_LIMIT)


def _at_most(
    what: str, part: Comparison, ours: PolicyChoice, theirs: PolicyChoice, measure: Measure, limit: float
) -> Target:
    ratio = part.ratio_over_settings(ours, theirs, measure)
    return Target(what, f"<= {limit:g}", str(ratio), ratio.estimate <= limit)


def _rival_targets(comparison: Comparison) -> Iterator[Target]:
    rivals = _rivals(comparison)
    for ours in _present(comparison, OURS):
        found = comparison.versus(ours, rivals, mean_ttft_s)
        ahead = [versus for versus in found if versus.is_better and versus.is_rarely_worse]
        behind = ", ".join(versus.rival.label for versus in found if versus not in ahead)
        measured = f"{len(ahead)} of {len(found)}" + (f"; not {behind}" if behind else "")
        yield Target(f"rivals that {ours.label} is better than", "all", measured, len(ahead) == len(found))


def _overload_targets(comparison: Comparison) -> Iterator[Target]:
    """In each setting on its own: a mean over settings would hide one bad one."""
    for setting in comparison.settings:
        if setting.load != OVERLOAD or setting.cache_tokens > SMALL_CACHE_TOKENS:
            continue
        means = {policy: comparison.mean(setting, policy, mean_ttft_s) for policy in _rivals(comparison)}
        best = min(means, key=lambda policy: means[policy])
        for ours in _present(comparison, OURS):
            ratio = comparison.mean(setting, ours, mean_ttft_s) / means[best]
            yield Target(
                f"{setting.workload}, {counted(setting.num_replicas, 'replica')}, load {setting.load:g}, "
                f"small cache: {ours.label} over the best rival",
                f"<= {OVERLOAD_LIMIT:g}",
                f"{ratio:.3f} ({best.label})",
                ratio <= OVERLOAD_LIMIT,
            )


def _is_at_load(load: float, setting: Setting) -> bool:
    return setting.load == load


def _is_of_workload(workload: str, setting: Setting) -> bool:
    return setting.workload == workload


def _present(comparison: Comparison, choices: Sequence[PolicyChoice]) -> list[PolicyChoice]:
    return [choice for choice in choices if choice in comparison.policies]


def _rivals(comparison: Comparison) -> list[PolicyChoice]:
    return [policy for policy in comparison.policies if policy.name != DEFAULT and not policy.is_ideal]
