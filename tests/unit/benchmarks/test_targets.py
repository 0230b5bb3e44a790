"""Verdicts: which rows have a target, and on which side of it a value falls."""

from __future__ import annotations

import pytest

from benchmarks import targets
from benchmarks.pairs import Ratio
from loadtest.placement.intervals import Interval


def _ratio(cpu: float) -> Ratio:
    """By CPU time; wall time says the opposite and must not matter."""
    return Ratio(Interval(cpu, cpu, cpu), Interval(1 / cpu, 1 / cpu, 1 / cpu), 3)


def _ratios(generate: float, continuous: float) -> dict[str, Ratio]:
    return {"generate": _ratio(generate), "continuous": _ratio(continuous)}


@pytest.mark.parametrize(
    ("generate", "continuous", "reached"),
    [
        (1.0, 3.0, [True, True]),
        (0.99, 3.0, [False, True]),
        (1.2, 2.99, [True, False]),
    ],
)
def test_decode_at_batch_32_has_two_targets(generate: float, continuous: float, reached: list[bool]) -> None:
    verdicts = targets.steady_decode("132M", 32, _ratios(generate, continuous))
    assert [verdict.is_reached for verdict in verdicts] == reached
    assert [verdict.required for verdict in verdicts] == [">= 1.00x", ">= 3.00x"]


def test_smaller_batches_are_only_held_to_generate() -> None:
    (verdict,) = targets.steady_decode("132M", 8, _ratios(1.31, 1.0))
    assert (verdict.measured, verdict.is_reached) == ("1.31x", True)


def test_a_miss_may_take_five_percent_longer() -> None:
    assert targets.miss("132M", _ratios(0.953, 1))[0].is_reached
    assert not targets.miss("132M", _ratios(0.949, 1))[0].is_reached


def test_only_the_long_prompt_at_ninety_percent_has_a_target() -> None:
    assert targets.hit("132M", 4096, 0.9, _ratio(7.0))[0].is_reached
    assert not targets.hit("132M", 4096, 0.9, _ratio(6.9))[0].is_reached
    assert targets.hit("132M", 1024, 0.9, _ratio(1)) == []
    assert targets.hit("132M", 4096, 0.5, _ratio(1)) == []


@pytest.mark.parametrize(("cost", "reached"), [(-0.02, True), (0.01, True), (0.0101, False)])
def test_caching_may_cost_one_percent(cost: float, reached: bool) -> None:
    (verdict,) = targets.caching_cost("132M", cost)
    assert verdict.is_reached is reached


def test_the_small_model_is_not_judged() -> None:
    assert targets.steady_decode("9M", 32, _ratios(0.1, 0.1)) == []
    assert targets.miss("9M", _ratios(0.1, 0.1)) == []
    assert targets.hit("9M", 4096, 0.9, _ratio(1)) == []
    assert targets.caching_cost("9M", 1.0) == []
