"""Which fits are as good as one speed.

Every engine fits its step time for itself, and fits of equal machines differ by some per cent: too little to
tell machines apart by, and more than a near-tie allows. So fits within noise of each other are one speed.

Pure functions of values: know fits and names; know no queues and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache.events import StepTimeModel
from cache.types import ReplicaId

# Where steps scatter by 15 %, fits of equal machines are within 10 % of the truth for work that they have
# seen, so two of them differ by up to 22 %. Half as slow again is another machine.
ALIKE = 1.25  # times as slow as the middle one, or as quick
STILL_ALIKE = 1.35  # for who was alike before: nobody goes to and fro on the border


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """Of one replica, or of several that are as good as equally fast."""

    model: StepTimeModel  # on any work, the mean of what they would take
    members: frozenset[ReplicaId]


Seconds = Callable[[StepTimeModel], float]


def speeds_of(
    fits: Mapping[ReplicaId, StepTimeModel], seconds: Seconds, before: Mapping[ReplicaId, Speed]
) -> list[Speed]:
    """The speeds of a fleet: around the median, then around the median of whoever is left, and so on.

    seconds: of a fit, for the work to compare them on. before: the speed that each was of. The first is that
    of the fleet's median, the lower one: of two machines the faster. O(replicas * (log + speeds)).
    """
    left = sorted([(seconds(fit), name) for name, fit in fits.items()])
    found = []
    while left:
        middle_s, middle = left[(len(left) - 1) // 2]
        fellows = before[middle].members if middle in before else frozenset[ReplicaId]()
        members = [
            name
            for each_s, name in left
            if is_alike(each_s, middle_s, STILL_ALIKE if name in fellows else ALIKE)
        ]
        found.append(Speed(mean_of([fits[name] for name in members]), frozenset(members)))
        left = [(each_s, name) for each_s, name in left if name not in found[-1].members]
    return found


def is_alike(one_s: float, other_s: float, times: float) -> bool:
    """Neither takes longer than that many times the other."""
    return one_s <= times * other_s and other_s <= times * one_s


def mean_of(fits: Sequence[StepTimeModel]) -> StepTimeModel:
    """Of at least one. Takes, on any work, the mean of what they take; equal ones, exactly what they do.

    Medians would not do: steps cannot always tell the terms apart, one fit has in `base_s` what the next one
    has in `per_sequence_s`, and the medians of both may be nothing.
    """
    first, count = fits[0], len(fits)
    return StepTimeModel(
        first.base_s + sum([fit.base_s - first.base_s for fit in fits]) / count,
        first.per_token_s + sum([fit.per_token_s - first.per_token_s for fit in fits]) / count,
        first.per_attention_s + sum([fit.per_attention_s - first.per_attention_s for fit in fits]) / count,
        first.per_sequence_s + sum([fit.per_sequence_s - first.per_sequence_s for fit in fits]) / count,
    )


def sound(fit: StepTimeModel | None) -> StepTimeModel | None:
    """The fit if its terms are finite and not negative: a bad one must not price work below zero."""
    if fit is None:
        return None
    terms = (fit.base_s, fit.per_token_s, fit.per_attention_s, fit.per_sequence_s)
    return fit if all(math.isfinite(term) and term >= 0 for term in terms) and any(terms) else None
