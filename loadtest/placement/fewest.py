"""The least count that keeps a limit, where more help, but for luck: of a simulated fleet's latency.

p99 falls with replicas as long as work waits for them, and then goes up and down a little, since one replica
more places everything differently. So halving alone finds a count that is enough, but not the least: one that
is not enough says nothing of those below it, unless it is clearly over. Knows counts and values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

# What luck does to p99 at most: of agents' loops it was 19 % longer with 10 replicas than with 8.
LUCK = 0.25
TRIED_ONE_BY_ONE = 16  # counts; beyond them as many are not enough for more than luck


def fewest(value: Callable[[int], float], limit: float, most: int) -> int | None:
    """Least count in [1, most] whose value is at most `limit`; None if none was found.

    It is the least of all, and so the same for every `most`, where no value is more than `LUCK` above one to
    its left and it is among the first `TRIED_ONE_BY_ONE` that are not clearly over; beyond these it is the
    least but for luck. O(log most + `TRIED_ONE_BY_ONE`) counts are asked for, some of them again.
    """
    first = _least(lambda count: value(count) <= (1.0 + LUCK) * limit, 1, most)
    if first is None:
        return None
    beyond = first + TRIED_ONE_BY_ONE
    for count in range(first, min(beyond, most + 1)):
        if value(count) <= limit:
            return count
    return _least(lambda count: value(count) <= limit, beyond, most) if beyond <= most else None


def _least(holds: Callable[[int], bool], first: int, most: int) -> int | None:
    """In [first, most], where more never undo it: by doubling the distance and halving the gap."""
    low, reach = first, 1  # none below `low` does
    while not holds(tried := min(first - 1 + reach, most)):
        if tried == most:
            return None
        low, reach = tried + 1, 2 * reach
    return low + bisect_left(range(low, tried), True, key=holds)
