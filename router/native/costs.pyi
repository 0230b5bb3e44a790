"""What `costs.c` is to Python: `router.pricing.cost.expected_times`, to the last bit.

Raises OverflowError where a number of tokens does not fit into 31 bits.
"""

from collections.abc import Sequence

from router.pricing.cost import Price, RequestShape

def expected_times(
    prices: Sequence[Price],
    cached: Sequence[int],
    shape: RequestShape,
    now: float,
    memory_pressure_s: float,
    /,
) -> list[float]: ...
