"""When screening pays: lines through measured times, and the share of rows that had to be computed anyway."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.layers import screen_costs
from replica.layers.screen_costs import ProductCost, ScreenCosts, compare

# The 132M network's output layer on one AVX-512 core, seconds.
WHOLE, SCREENED = ProductCost(5.0e-3, 0.37e-3), ProductCost(3.2e-3, 0.2e-3)


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_greedy_rows_alone_are_screened_where_it_takes_half_the_time(rows: int) -> None:
    assert ScreenCosts(WHOLE, SCREENED).pays(rows, 0)
    assert not ScreenCosts(SCREENED, WHOLE).pays(rows, 0)


@pytest.mark.parametrize(
    ("largest", "others", "pays"),
    [
        (0, 1, False),  # nothing to screen
        (1, 1, False),  # the weight would be read twice for one row
        (16, 16, False),
        (31, 1, True),  # 9.4 + 5.4 ms against 16.8
        (4, 28, False),
    ],
)
def test_in_a_mixed_step_the_greedy_rows_must_save_a_second_product(
    largest: int, others: int, pays: bool
) -> None:
    assert ScreenCosts(WHOLE, SCREENED).pays(largest, others) is pays


def test_rows_of_which_nothing_is_asked_cost_nothing_when_others_are_left_out() -> None:
    costs = ScreenCosts(WHOLE, SCREENED)
    assert costs.pays(0, 0, 1)  # a chunk of a prompt
    assert not costs.pays(0, 3)
    assert costs.pays(0, 1, 1)


def test_a_screen_that_hands_everything_back_is_soon_left_alone_and_seldom_tried_again() -> None:
    costs, screened = ScreenCosts(WHOLE, SCREENED), []
    for step in range(2000):
        if costs.pays(32, 0):
            costs.note(32, 32)
            screened.append(step)
        else:
            costs.note_left_alone()
    assert len([step for step in screened if step < 20]) < 10
    assert 5 < len([step for step in screened if step >= 20]) < 100


def test_a_row_now_and_then_changes_nothing() -> None:
    costs = ScreenCosts(WHOLE, SCREENED)
    for step in range(1000):
        assert costs.pays(32, 0)
        costs.note(32, int(step % 50 == 0))


class Machine:
    """Products that take what they take, and longer in a slow spell, on a clock of their own."""

    def __init__(self, slow: range = range(0), times: float = 2.0) -> None:
        self.now_s, self.calls = 0.0, 0
        self._slow, self._times = slow, times

    def product(self, cost: ProductCost) -> Callable[[int], None]:
        def call(rows: int) -> None:
            self.now_s += cost.of(rows) * (self._times if self.calls in self._slow else 1.0)
            self.calls += 1

        return call

    def compare(self, *costs: ProductCost) -> list[ProductCost]:
        return compare(*map(self.product, costs), clock=lambda: self.now_s)


def test_a_cost_is_the_line_through_the_shortest_call_with_few_rows_and_with_many() -> None:
    whole, screened = Machine().compare(WHOLE, SCREENED)
    assert (whole.base_s, whole.per_row_s) == pytest.approx((WHOLE.base_s, WHOLE.per_row_s))
    assert (screened.base_s, screened.per_row_s) == pytest.approx((SCREENED.base_s, SCREENED.per_row_s))
    assert screened.of(0) == 0.0


@given(began=st.integers(0, 60), length=st.integers(1, 4 * (screen_costs.FEWEST_TURNS - 1)))
def test_a_slow_spell_shorter_than_the_turns_changes_nothing(began: int, length: int) -> None:
    """It may fall on any of the calls; a whole turn is left."""
    slow = Machine(slow=range(began, began + length), times=50.0).compare(WHOLE, SCREENED)
    for found, true in zip(slow, (WHOLE, SCREENED), strict=True):
        assert (found.base_s, found.per_row_s) == pytest.approx((true.base_s, true.per_row_s))


def test_a_spell_as_long_as_it_all_slows_both_alike() -> None:
    whole, screened = Machine(slow=range(10_000), times=3.0).compare(WHOLE, SCREENED)
    assert whole.of(8) / screened.of(8) == pytest.approx(WHOLE.of(8) / SCREENED.of(8))


def test_small_layers_get_more_turns_and_large_ones_the_fewest() -> None:
    small, large = Machine(), Machine()
    small.compare(ProductCost(1e-6, 1e-7), ProductCost(1e-6, 1e-7))
    large.compare(ProductCost(2.0, 0.1), ProductCost(2.0, 0.1))
    assert small.calls == 4 * (1 + screen_costs.MOST_TURNS)
    assert large.calls == 4 * (1 + screen_costs.FEWEST_TURNS)


def test_noise_gives_no_negative_cost() -> None:
    times = iter(range(1000))
    (cost,) = compare(lambda rows: None, clock=lambda: -(float(next(times)) ** 2))
    assert cost.base_s >= 0.0
    assert cost.per_row_s >= 0.0


def test_it_is_measured_at_one_row_and_at_many() -> None:
    assert screen_costs.FEW_ROWS == 1 < screen_costs.MANY_ROWS
