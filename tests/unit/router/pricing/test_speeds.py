"""Which fits are one speed: a dozen numbers at a time, worked out by hand."""

from __future__ import annotations

import math

import pytest

from cache.events import StepTimeModel
from cache.types import ReplicaId
from router.pricing.speeds import Speed, mean_of, sound, speeds_of
from tests.fakes.router import replica_id


def fit(times: float) -> StepTimeModel:
    return StepTimeModel(0.01 * times, 1e-4 * times, 0.0, 0.0)


def seconds(model: StepTimeModel) -> float:
    return model.step_s(100, 0.0, 1)


def grouped(*times: float, before: tuple[tuple[int, ...], ...] = (), machines: str = "") -> list[set[int]]:
    """Indices by speed; before: the speeds there were; machines: a letter for each, a space for its own."""
    names = [replica_id(index) for index in range(len(times))]
    old: dict[ReplicaId, Speed] = {}
    for indices in before:
        members = frozenset(names[index] for index in indices)
        old |= dict.fromkeys(members, Speed(fit(1.0), members))
    on = {name: machine for name, machine in zip(names, machines, strict=False) if machine != " "}
    found = speeds_of(dict(zip(names, map(fit, times), strict=True)), seconds, old, on)
    return [{names.index(name) for name in speed.members} for speed in found]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((), []),
        ((7.0,), [{0}]),
        ((1.0, 1.1, 0.9), [{0, 1, 2}]),
        ((0.9, 0.9, 1.1, 0.9), [{0, 1, 2, 3}]),
        ((1.0, 1.5), [{0}, {1}]),  # of two, the faster is the fleet's
        ((1.5, 1.0, 1.0, 1.02), [{1, 2, 3}, {0}]),
        ((1.0, 10.0, 1.05), [{0, 2}, {1}]),
        ((2.0, 1.0, 2.1, 1.05, 1.9, 0.95), [{1, 3, 5}, {0, 2, 4}]),  # two kinds of machines
        ((0.5, 1.0, 1.0), [{1, 2}, {0}]),
    ],
)
def test_fits_within_noise_of_the_median_are_one_speed(
    times: tuple[float, ...], expected: list[set[int]]
) -> None:
    assert grouped(*times) == expected


@pytest.mark.parametrize(
    ("times", "machines", "expected"),
    [
        ((1.0, 1.9), "aa", [{0, 1}]),
        ((1.0, 2.1), "aa", [{0}, {1}]),  # two slow each other twice at most
        ((1.0, 2.1, 3.9, 1.2), "aaaa", [{0, 1, 2, 3}]),
        ((1.0, 1.0, 1.0, 10.0), "aaaa", [{0, 1, 2}, {3}]),
        ((1.0, 1.8, 3.0, 3.4), "aabb", [{0, 1}, {2, 3}]),  # two machines, and one is twice as fast
        ((1.0, 1.8, 1.2, 1.6), "aabb", [{0, 1, 2, 3}]),
        ((1.0, 1.8, 1.4, 1.4), "aa  ", [{0, 1, 2, 3}]),
        ((1.0, 1.8, 1.0, 1.0), "aa  ", [{2, 3}, {0, 1}]),  # together, though one of them is as fast as those
    ],
)
def test_who_shares_a_machine_is_as_fast_unless_sharing_does_not_explain_it(
    times: tuple[float, ...], machines: str, expected: list[set[int]]
) -> None:
    assert grouped(*times, machines=machines) == expected


def test_nobody_leaves_a_shared_machines_speed_on_the_border() -> None:
    assert grouped(1.0, 2.1, machines="aa") == [{0}, {1}]
    assert grouped(1.0, 2.1, before=((0, 1),), machines="aa") == [{0, 1}]
    assert grouped(1.0, 2.2, before=((0, 1),), machines="aa") == [{0}, {1}]


def test_nobody_goes_to_and_fro_on_the_border() -> None:
    assert grouped(1.0, 1.0, 1.3) == [{0, 1}, {2}]
    assert grouped(1.0, 1.0, 1.3, before=((0, 1, 2),)) == [{0, 1, 2}]
    assert grouped(1.0, 1.0, 1.4, before=((0, 1, 2),)) == [{0, 1}, {2}]
    assert grouped(1.0, 1.0, 1.3, before=((0, 1), (2,))) == [{0, 1}, {2}]


def test_the_mean_of_fits_takes_the_mean_of_their_times_however_they_split_it() -> None:
    """Steps of one size cannot tell what is fixed from what comes with a sequence."""
    fits = [StepTimeModel(4e-3, 1e-5, 0.0, 0.0), StepTimeModel(0.0, 1e-5, 0.0, 4e-3)]
    assert mean_of(fits).step_s(500, 0.0, 1) == pytest.approx(fits[0].step_s(500, 0.0, 1))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 49, 64])
def test_equal_fits_have_themselves_for_a_mean_to_the_bit(count: int) -> None:
    model = StepTimeModel(0.0065, 32e-6, 1.4e-9, 0.6e-3)
    assert mean_of([model] * count) == model


def test_a_fit_below_zero_at_nothing_or_without_end_is_none() -> None:
    assert sound(StepTimeModel(-0.1, 1e-4, 0.0, 0.0)) is None
    assert sound(StepTimeModel(math.inf, 1e-4, 0.0, 0.0)) is None
    assert sound(StepTimeModel(0.0, 0.0, 0.0, 0.0)) is None
    assert sound(StepTimeModel(1e308, 1e-4, 0.0, 0.0)) is None  # nor is its time for two tokens finite
    assert sound(None) is None
    assert sound(fit(1.0)) == fit(1.0)
