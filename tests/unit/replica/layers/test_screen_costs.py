"""When screening pays: lines through measured times, and the share of rows that had to be computed anyway."""

from __future__ import annotations

import pytest

from replica.layers import screen_costs
from replica.layers.screen_costs import ProductCost, ScreenCosts, measure

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


def test_a_cost_is_the_line_through_the_shortest_of_a_few_calls() -> None:
    now = 0.0
    delays = [1.0, 0.0, 3.0] * 2

    def product(rows: int) -> None:
        nonlocal now
        now += 0.5 + 0.25 * rows + delays.pop(0) if len(calls) % 4 else 9.0
        calls.append(rows)

    calls: list[int] = []
    cost = measure(product, clock=lambda: now)
    assert calls == [1] * 4 + [32] * 4
    assert cost.per_row_s == pytest.approx(0.25)
    assert cost.base_s == pytest.approx(0.5)
    assert cost.of(0) == 0.0
    assert cost.of(8) == pytest.approx(2.5)


def test_noise_gives_no_negative_cost() -> None:
    times = iter(range(100))
    cost = measure(lambda rows: None, clock=lambda: -(float(next(times)) ** 2))
    assert cost.base_s >= 0.0
    assert cost.per_row_s >= 0.0


def test_it_is_measured_at_one_row_and_at_many() -> None:
    assert screen_costs.FEW_ROWS == 1 < screen_costs.MANY_ROWS
