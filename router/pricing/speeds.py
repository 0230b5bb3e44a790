"""Which fits are as good as one speed.

Every engine fits its step time for itself, and fits of equal machines differ by some per cent: too little to
tell machines apart by, and more than a near-tie allows. So fits within noise of each other are one speed.

Engines that share a machine's cores, or a card, slow each other: each fit tells how many of the others
computed while that engine did, which says nothing of its next request. They are as fast as the machine is for
all of them, unless they differ by more than sharing explains.

Pure functions of values: know fits and names; know no queues and no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.events import StepTimeModel
from cache.types import ReplicaId

# Where steps scatter by 15 %, fits of equal machines are within 10 % of the truth for work that they have
# seen, so two of them differ by up to 22 %. Half as slow again is another machine.
ALIKE = 1.25  # times as slow as the middle one, or as quick
STILL_ALIKE = 1.35  # for who was alike before: nobody goes to and fro on the border
MOST_S = 3600.0  # of a term: sums of much larger ones are infinite, and what is infinite is not priced


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """Of one replica, or of several that are as good as equally fast."""

    model: StepTimeModel  # on any work, the mean of what they would take
    members: frozenset[ReplicaId]


Seconds = Callable[[StepTimeModel], float]


def speeds_of(
    fits: Mapping[ReplicaId, StepTimeModel],
    seconds: Seconds,
    before: Mapping[ReplicaId, Speed],
    machines: Mapping[ReplicaId, str],
) -> list[Speed]:
    """The speeds of a fleet: around the median, then around the median of whoever is left, and so on.

    seconds: of a fit, for the work to compare them on. before: the speed that each was of. machines: the
    names of those that are shared. The first is that of the fleet's median, the lower one: of two machines
    the faster. O(replicas * (log + speeds)).
    """
    left = sorted(_sharers(fits, seconds, before, machines), key=lambda sharers: sharers[:2])
    found = []
    while left:
        alike, left = _split(left, before, ALIKE, STILL_ALIKE)
        names = frozenset[ReplicaId]().union(*[each.names for each in alike])
        found.append(Speed(mean_of([each.fit for each in alike for _ in each.names]), names))
    return found


def alike_on_one_machine(num_sharers: int) -> float:
    """Times that two of so many may differ and be as fast: n engines slow each other n times at most."""
    return max(ALIKE, float(num_sharers))


def still_alike_on_one_machine(num_sharers: int) -> float:
    """The same for who was alike before."""
    return STILL_ALIKE / ALIKE * alike_on_one_machine(num_sharers)


class _Sharers(NamedTuple):
    """Replicas that are as fast because they share a machine; one alone, if it shares none."""

    seconds: float  # of their fit
    names: tuple[ReplicaId, ...]  # sorted
    fit: StepTimeModel  # the mean of theirs


def _sharers(
    fits: Mapping[ReplicaId, StepTimeModel],
    seconds: Seconds,
    before: Mapping[ReplicaId, Speed],
    machines: Mapping[ReplicaId, str],
) -> list[_Sharers]:
    found, by_machine = [], defaultdict[str, list[_Sharers]](list)
    for name, fit in fits.items():
        alone = _Sharers(seconds(fit), (name,), fit)
        if name in machines:
            by_machine[machines[name]].append(alone)
        else:
            found.append(alone)
    for those in by_machine.values():
        found += _together(sorted(those, key=lambda one: one[:2]), seconds, before)
    return found


def _together(
    those: Sequence[_Sharers], seconds: Seconds, before: Mapping[ReplicaId, Speed]
) -> list[_Sharers]:
    """Of one machine, sorted: all that sharing explains, and each of the others for itself."""
    count = len(those)
    alike, others = _split(those, before, alike_on_one_machine(count), still_alike_on_one_machine(count))
    fit = mean_of([each.fit for each in alike])
    names = tuple(sorted([name for each in alike for name in each.names]))
    return [_Sharers(seconds(fit), names, fit), *others]


def _split(
    those: Sequence[_Sharers], before: Mapping[ReplicaId, Speed], near: float, still_near: float
) -> tuple[list[_Sharers], list[_Sharers]]:
    """Sorted, at least one: those alike to the middle one, within `near`, and the others.

    still_near: for who was of its speed before.
    """
    middle = _middle(those)
    fellows = frozenset[ReplicaId]().union(*[before[name].members for name in middle.names if name in before])
    alike, others = list[_Sharers](), list[_Sharers]()
    for each in those:
        times = near if fellows.isdisjoint(each.names) else still_near
        (alike if is_alike(each.seconds, middle.seconds, times) else others).append(each)
    return alike, others


def _middle(those: Sequence[_Sharers]) -> _Sharers:
    """Of the replicas, the lower median's."""
    place = (sum([len(each.names) for each in those]) - 1) // 2
    for each in those:
        place -= len(each.names)
        if place < 0:
            return each
    raise AssertionError("there is at least one")


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
    """The fit if its terms are seconds that a machine may take: a bad one must not price work below zero, nor
    make a cost that cannot be compared."""
    if fit is None:
        return None
    terms = (fit.base_s, fit.per_token_s, fit.per_attention_s, fit.per_sequence_s)
    return fit if all(0.0 <= term <= MOST_S for term in terms) and any(terms) else None
