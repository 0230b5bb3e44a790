"""Whether screening a step's greedy rows is cheaper than the whole product: measured, then arithmetic.

A product of few rows costs what reading the weight costs, one of many what multiplying costs; both ways are
taken as straight lines between the two. Rows that a screen hands back are paid for twice; how many do is
followed, so that a model it does not suit is soon left alone, and tried again from time to time.

Knows seconds and rows; knows neither weights nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Measured at: the fewest rows there are, and what a busy replica decodes in a step.
FEW_ROWS, MANY_ROWS = 1, 32
REPEATS = 3

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


def measure(product: Callable[[int], object], clock: Callable[[], float] = time.perf_counter) -> ProductCost:
    """The line through the best of a few calls with few rows and with many. product: given its rows."""
    few_s, many_s = (_shortest_s(product, rows, clock) for rows in (FEW_ROWS, MANY_ROWS))
    per_row_s = max(0.0, (many_s - few_s) / (MANY_ROWS - FEW_ROWS))
    return ProductCost(max(0.0, few_s - FEW_ROWS * per_row_s), per_row_s)


def _shortest_s(product: Callable[[int], object], rows: int, clock: Callable[[], float]) -> float:
    product(rows)  # the first call of a shape compiles its kernel
    times = []
    for _ in range(REPEATS):
        began_s = clock()
        product(rows)
        times.append(clock() - began_s)
    return min(times)
