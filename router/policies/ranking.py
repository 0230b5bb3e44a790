"""Orders of candidates that several policies share. Pure functions but for the draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from router.policies.base import Scored
from router.pricing.cost import Candidate


def by_cost(
    candidates: Sequence[Candidate], costs: Sequence[float], rng: random.Random | None = None
) -> list[Scored]:
    """Cheapest first. Equal ones are shuffled, or without `rng` stay in the order given."""
    if rng is None:
        order = sorted(range(len(candidates)), key=costs.__getitem__)
    else:
        keys = [(cost, rng.random()) for cost in costs]
        order = sorted(range(len(candidates)), key=keys.__getitem__)
    return [Scored(candidates[index], costs[index]) for index in order]


def chosen_first(chosen: Candidate, rest: Iterable[Candidate]) -> list[Scored]:
    """The chosen one, then the others in their order. `rest` may contain it or not."""
    return [
        Scored(chosen, None),
        *[Scored(candidate, None) for candidate in rest if candidate is not chosen],
    ]


def least_loaded(
    candidates: Sequence[Candidate],
    load: Callable[[Candidate], float],
    rng: random.Random | None = None,
) -> list[Candidate]:
    """Least load first. Equal ones are shuffled, or without `rng` stay in the order given."""
    if rng is None:
        return sorted(candidates, key=load)
    return sorted(candidates, key=lambda candidate: (load(candidate), rng.random()))


def least_loaded_if_uneven(
    candidates: Sequence[Candidate], load: Callable[[Candidate], float], max_apart: float
) -> Sequence[Candidate]:
    """All of them; where the most and the least load are further apart than that, those with the least."""
    loads = [load(candidate) for candidate in candidates]
    least = min(loads)
    if max(loads) - least <= max_apart:
        return candidates
    return [candidate for candidate, its_load in zip(candidates, loads, strict=True) if its_load == least]


def num_requests(candidate: Candidate) -> int:
    """Requests the replica has, whoever sent them."""
    return candidate.load.num_requests


def num_in_flight(candidate: Candidate) -> int:
    """Requests this router has sent there that are not over."""
    return candidate.load.num_in_flight


def two_random_choices(candidates: Sequence[Candidate], rng: random.Random) -> list[Scored]:
    """The less loaded of two drawn at random, then the rest in random order (Mitzenmacher 2001)."""
    shuffled = rng.sample(candidates, len(candidates))
    if len(shuffled) > 1 and num_requests(shuffled[1]) < num_requests(shuffled[0]):
        shuffled[0], shuffled[1] = shuffled[1], shuffled[0]
    return [Scored(candidate, None) for candidate in shuffled]
