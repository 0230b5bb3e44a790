"""Exclusive bounds that llguidance 1.9 lets pass, as inclusive ones a little further in.

    0 < x <= 0.5, 3 < x < 3.25    `0`, `3` passed: one integer part, and no digits behind the excluded bound
    -0.5 <= x < 0                 so did `-0`
    x < 1e17, for integers        `100000000000000000` passed: in doubles one less is the same

Others it holds itself, and they stay as they are written. Bounds also meet that stand in several parts of a
schema, by `allOf` or `$ref`, so the other one is looked for in all of it. Knows the names of bounds; knows
neither where parts are nor what else is in them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INWARDS = 1e-6  # of the way to the other bound: values so near to an excluded one are given up
_EXACT = 2.0**53  # from here on not every integer is a double


@dataclass(frozen=True, slots=True)
class _Side:
    exclusive: str
    inclusive: str
    opposite: tuple[str, str]
    inwards: int  # bounds times it are bounds from below


_SIDES = (
    _Side("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
    _Side("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
)


def make_inclusive(schemas: Sequence[dict[str, Any]]) -> None:
    """Changes those that would let an excluded bound pass. schemas: one, and all in it."""
    for side in _SIDES:
        bounds = (_number(schema.get(name)) for schema in schemas for name in side.opposite)
        others = sorted(side.inwards * bound for bound in bounds if bound is not None)
        for schema in schemas:
            bound = _excluded(schema, side)
            inner = None if bound is None else _inner(side.inwards * bound, others, schema.get("type"))
            if inner is not None:
                schema[side.inclusive] = side.inwards * inner
                del schema[side.exclusive]


def _excluded(schema: dict[str, Any], side: _Side) -> float | None:
    """The bound that a schema excludes on this side; None where the stricter one is included."""
    given, included = schema.get(side.exclusive), _number(schema.get(side.inclusive))
    bound = included if given is True else _number(given)  # draft 4 has it beside the other, as a switch
    if bound is None or (included is not None and side.inwards * (included - bound) > 0):
        return None
    return bound


def _inner(bound: float, others: list[float], kind: object) -> float | None:
    """The least that is let in above an excluded bound; None where llguidance finds it itself.

    It is never beyond the other bound: whatever has a value in doubles still has one.
    """
    if abs(bound) >= _EXACT:
        return None if kind == "number" else math.nextafter(bound, math.inf)
    if kind == "integer" or bound < 0 or not bound.is_integer():
        return None
    index = bisect_right(others, bound)
    if index == len(others) or others[index] >= bound + 1:
        return None
    return max(bound + (others[index] - bound) * INWARDS, math.nextafter(bound, math.inf))


def _number(value: object) -> float | None:
    """As llguidance reads it; None for what is no number, or beyond floats' range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
