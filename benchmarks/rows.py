"""One line of the result: a quantity, its value for each contender, the comparison, the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.pairs import Ratio
from benchmarks.spans import Span


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target beside what was measured."""

    target: str  # "steady decode >= generate's"
    required: str  # ">= 1.00x"
    measured: str  # "1.31x"
    is_reached: bool


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured, by contender, in the section's unit."""

    model: str
    section: str  # what is measured, and its unit
    label: str
    values: Mapping[str, Span] = field(default_factory=dict)  # by contender, on both clocks
    amounts: Mapping[str, float] = field(default_factory=dict)  # by contender, where there is no clock
    ratios: Mapping[str, Ratio] = field(default_factory=dict)  # beside that contender
    verdicts: tuple[Verdict, ...] = ()
    note: str = ""

    def judged(self, *verdicts: Verdict) -> Row:
        return replace(self, verdicts=(*self.verdicts, *verdicts))

    def to_json(self) -> dict[str, Any]:
        """Plain values; seconds and rates as {"wall_s": .., "cpu_s": ..} in the section's unit, ratios as
        [estimate, low, high] of the 95 % interval."""
        told = {name: each.to_json() for name, each in self.ratios.items()}
        return {**asdict(replace(self, ratios={})), "ratios": told}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Row:
        """Inverse of `to_json`. Raises KeyError or TypeError for anything else."""
        return cls(
            told["model"],
            told["section"],
            told["label"],
            {name: Span(**value) for name, value in told["values"].items()},
            told["amounts"],
            {name: Ratio.from_json(value) for name, value in told["ratios"].items()},
            tuple(Verdict(**verdict) for verdict in told["verdicts"]),
            told["note"],
        )
