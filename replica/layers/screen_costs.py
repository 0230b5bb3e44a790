"""Whether screening a step's greedy rows is cheaper than the whole product: measured, then arithmetic.

A product of few rows costs what reading the weight costs, one of many what multiplying costs; both ways are
taken as straight lines between the two. Rows that a screen hands back are paid for twice; how many do is
followed, so that a model it does not suit is soon left alone, and tried again from time to time.

Knows seconds and rows; knows neither weights nor requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

# Measured at: the fewest rows there are, and what a busy replica decodes in a step.
FEW_ROWS, MANY_ROWS = 1, 32
# Turns of all that is compared: small layers, whose calls the clock barely tells apart, get more of them.
FEWEST_TURNS, MOST_TURNS, ENOUGH_S = 3, 20, 0.5

Clock = Callable[[], float]

# Newest step's weight in the share of rows handed back; and what is left of that share after a step that
# did not screen: a screen that was left alone is tried again after some hundreds of steps.
_NEWEST = 0.1
_FORGETTING = 0.995


@dataclass(frozen=True, slots=True)
class ProductCost:
    """Seconds of a product, by its rows; none for none."""

    base_s: float
    per_row_s: float

    def of(self, num_rows: float) -> float:
        return self.base_s + num_rows * self.per_row_s if num_rows else 0.0


class ScreenCosts:
    """What both ways take on this machine, and how often a screen decides. Engine thread only."""

    def __init__(self, whole: ProductCost, screened: ProductCost, handed_back: float = 0.0) -> None:
        """handed_back: the share of screened rows that is to be expected, until some were."""
        self._whole = whole
        self._screened = screened
        self._handed_back = handed_back

    def seconds(self, num_largest: int) -> float:
        """What so many rows take when they are screened, those handed back with them."""
        anything = 1.0 - (1.0 - self._handed_back) ** num_largest  # how likely any row is handed back
        again_s = self._whole.base_s * anything + self._whole.per_row_s * num_largest * self._handed_back
        return self._screened.of(num_largest) + again_s

    def pays(self, num_largest: int, num_others: int, num_unused: int = 0) -> bool:
        """Whether to screen. The rows of which only the largest logit is asked, all logits, and none."""
        anything = 1.0 - (1.0 - self._handed_back) ** num_largest  # how likely any row is handed back
        again = num_others + num_largest * self._handed_back
        product_s = self._whole.base_s * (1.0 if num_others else anything) + self._whole.per_row_s * again
        split_s = self._screened.of(num_largest) + product_s
        return split_s < self._whole.of(num_largest + num_others + num_unused)

    def note(self, num_screened: int, num_handed_back: int) -> None:
        """A step screened so many rows, of which so many had to be computed in full all the same."""
        if num_screened:
            self._handed_back += _NEWEST * (num_handed_back / num_screened - self._handed_back)

    def note_left_alone(self) -> None:
        """A step that could have been screened was not."""
        self._handed_back *= _FORGETTING


def compare(*products: Callable[[int], object], clock: Clock = time.process_time) -> list[ProductCost]:
    """Of each product (called with its rows), the line through the shortest of its calls with few rows and
    with many.

    The choice is for the life of the process, and the machine may be busy while a replica starts. So waiting
    for a core is not counted (CPU time; a kernel's threads wait for each other awake, in both ways alike),
    and the products take turns: a slow spell counts only if it lasts through all of them, and then for all.
    """
    shortest_s = [{FEW_ROWS: math.inf, MANY_ROWS: math.inf} for _ in products]
    for product in products:
        for rows in (FEW_ROWS, MANY_ROWS):
            product(rows)  # the first call of a shape compiles its kernel
    began_s, turns = clock(), 0
    while turns < FEWEST_TURNS or (turns < MOST_TURNS and clock() - began_s < ENOUGH_S):
        for product, best_s in zip(products, shortest_s, strict=True):
            for rows in (FEW_ROWS, MANY_ROWS):
                called_s = clock()
                product(rows)
                best_s[rows] = min(best_s[rows], clock() - called_s)
        turns += 1
    return [_line(best_s[FEW_ROWS], best_s[MANY_ROWS]) for best_s in shortest_s]


def _line(few_s: float, many_s: float) -> ProductCost:
    per_row_s = max(0.0, (many_s - few_s) / (MANY_ROWS - FEW_ROWS))
    return ProductCost(max(0.0, few_s - FEW_ROWS * per_row_s), per_row_s)
