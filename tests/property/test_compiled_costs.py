"""Costs that are summed in C are Python's, to the last bit, whatever the fleet."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pricing.cost import Price, RequestShape, interpreted_times
from tests.property.test_routing_cost import MODELS

compiled = pytest.importorskip(
    "router.native.costs", reason="not compiled: no C compiler at the installation"
)

NOW = 1000.0
MOSTLY_NONE = st.just(0.0) | st.floats(0, 10)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Price], list[int], RequestShape]:
    """Machines of a few kinds, what each holds of a prompt, and the prompt."""
    total = draw(st.integers(1, 100_000))
    kinds, typical = draw(st.lists(MODELS, min_size=1, max_size=3)), draw(MODELS)
    # Often as much as others hold, or nothing.
    held = st.sampled_from([0, total // 2, total - 1]) | st.integers(0, total - 1)
    price = st.builds(
        Price,
        busy_until=st.floats(NOW - 10, NOW + 10),
        step_time=st.sampled_from([*kinds, typical]),
        decode_s=MOSTLY_NONE,
        room=st.integers(1, 8192),
        step_s=st.just(0.25) | MOSTLY_NONE,
        boundary_at=st.sampled_from([-math.inf, NOW, NOW - 0.5]) | st.floats(NOW - 1, NOW + 1),
        memory_pressure=MOSTLY_NONE,
        fleet_time=st.just(typical),
        regret=MOSTLY_NONE,
        alone_s=MOSTLY_NONE,
        uses_lost=MOSTLY_NONE,
        passed_s=MOSTLY_NONE,
    )
    prices = draw(st.lists(price, max_size=8))
    shape = st.builds(
        RequestShape,
        st.just(total),
        hot_tokens=st.just(0) | held,
        recompute_weight=st.floats(1, 100),
        hot_share=st.floats(0, 1),
        most_cached=held,
    )
    return prices, [draw(held) for _ in prices], draw(shape)


@given(fleets(), st.floats(0, 1))
def test_the_same_costs(fleet: tuple[list[Price], list[int], RequestShape], pressure_s: float) -> None:
    prices, cached, shape = fleet
    expected = interpreted_times(prices, cached, shape, NOW, pressure_s)
    assert compiled.expected_times(prices, cached, shape, NOW, pressure_s) == expected
    assert compiled.expected_times(tuple(prices), tuple(cached), shape, NOW, pressure_s) == expected


PRICE = Price(NOW, None, 0.01, 256, 0.02, -math.inf, 0.1, None)  # type: ignore[arg-type]  # of no speed


@pytest.mark.parametrize(
    ("prices", "cached", "shape", "error", "says"),
    [
        ([PRICE], [], RequestShape(8), ValueError, "1 prices and 0 cached"),
        ([PRICE], [0], RequestShape(8), AttributeError, "base_s"),
        ([PRICE], [2**31], RequestShape(8), OverflowError, "2147483648 tokens: needs 0 to 2147483647"),
        ([PRICE], [-1], RequestShape(8), OverflowError, "-1 tokens: needs 0 to"),
        ([PRICE], [0], RequestShape(2**31), OverflowError, "2147483648 tokens: needs 0 to"),
        ([PRICE], [0], RequestShape(2**70), OverflowError, "too (big|large)"),
        ([PRICE._replace(room=0)], [0], RequestShape(8), ZeroDivisionError, "room = 0: needs 1 token"),
        ([PRICE[:5]], [0], RequestShape(8), IndexError, "out of range"),
        ([None], [0], RequestShape(8), TypeError, "a price is a tuple"),
        (None, [0], RequestShape(8), TypeError, "not iterable"),
    ],
)
def test_what_is_no_price_is_an_error_and_nothing_is_kept(
    prices: Sequence[Price], cached: list[int], shape: RequestShape, error: type[Exception], says: str
) -> None:
    before = sys.getrefcount(PRICE)
    for _ in range(3):
        with pytest.raises(error, match=says):
            compiled.expected_times(prices, cached, shape, NOW, 0.1)
    assert sys.getrefcount(PRICE) == before
