"""What a grid's results say of the policies: each beside the ideal, and ours beside each rival.

Knows summaries; knows neither files nor tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.placement.intervals import Interval, geometric_mean, paired_ratio, paired_ratio_over_cells
from loadtest.placement.policy_choice import PolicyChoice
from loadtest.placement.suites import Setting
from loadtest.placement.summary import CellSummary

Measure = Callable[[CellSummary], float]

NOT_WORSE_SHARE = 0.9  # of the cells in which a policy must not be significantly worse than a rival


def mean_ttft_s(summary: CellSummary) -> float:
    return summary.mean_ttft_s


def p99_ttft_s(summary: CellSummary) -> float:
    return summary.p99_ttft_s


class Comparison:
    """Summaries by setting, policy and seed; every policy has every seed in every setting."""

    def __init__(self) -> None:
        self._summaries: dict[Setting, dict[PolicyChoice, dict[int, CellSummary]]] = {}

    def add(self, setting: Setting, policy: PolicyChoice, seed: int, summary: CellSummary) -> None:
        self._summaries.setdefault(setting, {}).setdefault(policy, {})[seed] = summary

    @property
    def settings(self) -> list[Setting]:
        return sorted(self._summaries)

    @property
    def policies(self) -> list[PolicyChoice]:
        """In the order they came."""
        return list(dict.fromkeys(policy for by_policy in self._summaries.values() for policy in by_policy))

    def only(self, keep: Callable[[Setting], bool]) -> Comparison:
        """The part with those settings."""
        part = Comparison()
        part._summaries = {setting: found for setting, found in self._summaries.items() if keep(setting)}
        return part

    def of(self, setting: Setting, policy: PolicyChoice) -> list[CellSummary]:
        """By seed, the lowest first."""
        by_seed = self._summaries[setting][policy]
        return [by_seed[seed] for seed in sorted(by_seed)]

    def by_seed(self, setting: Setting, policy: PolicyChoice) -> Mapping[int, CellSummary]:
        return self._summaries[setting].get(policy, {})

    def mean(self, setting: Setting, policy: PolicyChoice, measure: Measure) -> float:
        """Over seeds."""
        values = [measure(summary) for summary in self.of(setting, policy)]
        return sum(values) / len(values)

    def ratio(self, setting: Setting, ours: PolicyChoice, theirs: PolicyChoice, measure: Measure) -> Interval:
        """Geometric mean over seeds of our measure over theirs."""
        return paired_ratio(*self._paired(setting, ours, theirs, measure))

    def ratio_over_settings(self, ours: PolicyChoice, theirs: PolicyChoice, measure: Measure) -> Interval:
        """The same over all settings as well."""
        pairs = [self._paired(setting, ours, theirs, measure) for setting in self.settings]
        return paired_ratio_over_cells([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def ratio_by_length(self, ours: PolicyChoice, theirs: PolicyChoice, place: int) -> float | None:
        """Geometric mean of mean times to first token of prompts of one length; None if there are no such.

        place: in `summary.LENGTH_LABELS`.
        """
        ratios = []
        for setting in self.settings:
            for our, their in zip(self.of(setting, ours), self.of(setting, theirs), strict=True):
                our_s, their_s = our.mean_ttft_by_length_s[place], their.mean_ttft_by_length_s[place]
                if our_s is not None and their_s is not None:
                    ratios.append(our_s / their_s)
        return geometric_mean(ratios) if ratios else None

    def beside_one_router(self, policy: PolicyChoice, num_routers: int, measure: Measure) -> Interval | None:
        """Geometric mean of a policy's measure with so many routers over the same with one.

        None where one of the two was not run.
        """
        several = [s for s in self.settings if s.num_routers == num_routers]
        ones = [replace(setting, num_routers=1) for setting in several]
        if not several or not set(ones) <= set(self.settings):
            return None
        return paired_ratio_over_cells(
            [[measure(summary) for summary in self.of(setting, policy)] for setting in several],
            [[measure(summary) for summary in self.of(setting, policy)] for setting in ones],
        )

    def versus(self, ours: PolicyChoice, rivals: Iterable[PolicyChoice], measure: Measure) -> list[Versus]:
        return [
            Versus(
                rival,
                self.ratio_over_settings(ours, rival, measure),
                tuple(self.ratio(setting, ours, rival, measure) for setting in self.settings),
            )
            for rival in rivals
        ]

    def _paired(
        self, setting: Setting, ours: PolicyChoice, theirs: PolicyChoice, measure: Measure
    ) -> tuple[list[float], list[float]]:
        by_policy = self._summaries[setting]
        seeds = sorted(by_policy[ours].keys() & by_policy[theirs].keys())
        return (
            [measure(by_policy[ours][seed]) for seed in seeds],
            [measure(by_policy[theirs][seed]) for seed in seeds],
        )


@dataclass(frozen=True, slots=True)
class Versus:
    """One policy beside one rival; below 1 is better than the rival."""

    rival: PolicyChoice
    overall: Interval  # geometric mean over cells and seeds
    cells: Sequence[Interval]  # per setting, over seeds

    @property
    def num_worse(self) -> int:
        """Cells in which it is significantly worse."""
        return sum(cell.is_above_1 for cell in self.cells)

    @property
    def num_better(self) -> int:
        return sum(cell.is_below_1 for cell in self.cells)

    @property
    def is_rarely_worse(self) -> bool:
        return len(self.cells) - self.num_worse >= NOT_WORSE_SHARE * len(self.cells)

    @property
    def is_better(self) -> bool:
        """Significantly, in the geometric mean."""
        return self.overall.is_below_1

    @property
    def verdict(self) -> str:
        if math.isinf(self.overall.high):
            return "one seed: cannot tell"
        if self.is_better and self.is_rarely_worse:
            return "better"
        if self.is_better:
            return "better, but worse in too many cells"
        return "worse" if self.overall.is_above_1 else "no significant difference"
