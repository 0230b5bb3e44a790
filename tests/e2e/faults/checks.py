"""Outcomes against promises: each check gives one row, target beside measured. Knows no cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.e2e.faults.traffic import Outcome, Question

_NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Row:
    """One promise, held beside what was found."""

    promise: str
    target: str
    measured: str
    is_kept: bool | None  # None: not tried, `measured` says why; or nothing is promised, only told

    @property
    def is_run(self) -> bool:
        """False: it could not be tried here."""
        return self.is_kept is not None or not self.measured.startswith(_NOT_RUN)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def failures(outcomes: Sequence[Outcome]) -> Counter[str]:
    """What went wrong, and how often. Cancelled by us is not wrong."""
    return Counter(each.failure for each in outcomes if each.failure is not None)


def zero_errors(promise: str, outcomes: Sequence[Outcome]) -> Row:
    """Every client got a whole answer. Nothing asked is nothing shown: a miss."""
    wrong = failures(outcomes)
    measured = f"{sum(wrong.values())} errors of {len(outcomes)}" + _listed(wrong)
    return Row(promise, "0 errors", measured, bool(outcomes) and not wrong)


def no_truncated_stream(promise: str, outcomes: Sequence[Outcome]) -> Row:
    """No stream ended as if it were whole and was not: what fails, fails loudly."""
    begun = [each for each in outcomes if each.status == 200 and not each.is_cancelled]
    silent = [each for each in begun if not each.is_whole and each.error is None]
    return Row(promise, "0 truncated", f"{len(silent)} truncated of {len(begun)}", bool(begun) and not silent)


def same_text(
    promise: str, outcomes: Sequence[Outcome], truth: Mapping[Question, str], *, share: float = 1.0
) -> Row:
    """At least `share` of these streams ended whole, with the text of an undisturbed run."""
    same = sum(each.is_whole and each.text == truth[each.question] for each in outcomes)
    other = Counter(
        each.failure or ("whole, another text" if each.text != truth[each.question] else "")
        for each in outcomes
    )
    del other[""]
    measured = f"{same} of {len(outcomes)}" + _listed(other)
    return Row(promise, f"{share:.0%} identical", measured, bool(outcomes) and same >= share * len(outcomes))


def only_busy(promise: str, outcomes: Sequence[Outcome]) -> Row:
    """Whoever was refused was told 429, and nobody anything else."""
    wrong = failures(outcomes)
    busy = sum(count for what, count in wrong.items() if what.startswith("status 429"))
    others = Counter({what: count for what, count in wrong.items() if not what.startswith("status 429")})
    measured = f"{busy} times 429, {sum(others.values())} other errors, of {len(outcomes)}" + _listed(others)
    return Row(promise, "only 429", measured, bool(outcomes) and not others)


def at_most(promise: str, value: float, limit: float, unit: str = "s") -> Row:
    """A number within its limit; nan is a miss."""
    return Row(promise, f"<= {limit:g} {unit}", f"{value:.3g} {unit}", value <= limit)


def at_least(promise: str, value: float, limit: float, unit: str = "") -> Row:
    """A number that reaches its limit; nan is a miss."""
    return Row(promise, f">= {limit:g} {unit}".rstrip(), f"{value:.3g} {unit}".rstrip(), value >= limit)


def memory_slope(
    promise: str, samples: Sequence[tuple[float, int]], *, mib_per_minute: float, least_s: float
) -> Row:
    """How memory grows, of (seconds, resident bytes). Shorter than `least_s` it is not told: a slope of what
    is still warming up means nothing. No sample is a miss."""
    target = at_most(promise, slope_of(samples), mib_per_minute, "MiB/min")
    if samples and samples[-1][0] - samples[0][0] < least_s:
        return Row(promise, target.target, f"not told, run shorter than {least_s / 60:g} minutes", None)
    return target


def not_run(promise: str, target: str, why: str) -> Row:
    """A promise that could not be tried here."""
    return Row(promise, target, f"{_NOT_RUN}: {why}", None)


def slope_of(samples: Sequence[tuple[float, int]]) -> float:
    """MiB per minute: least squares, the first third left out as warm-up; nan of too few samples."""
    return _slope(samples[len(samples) // 3 :]) * 60 / (1 << 20)


def _slope(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes per second; nan of fewer than three samples."""
    if len(samples) < 3:
        return math.nan
    mean_s = sum(at for at, _ in samples) / len(samples)
    mean = sum(size for _, size in samples) / len(samples)
    spread = sum((at - mean_s) ** 2 for at, _ in samples)
    return sum((at - mean_s) * (size - mean) for at, size in samples) / spread if spread else math.nan


def _listed(counts: Counter[str]) -> str:
    return f" ({', '.join(f'{count} x {what}' for what, count in counts.most_common(4))})" if counts else ""
