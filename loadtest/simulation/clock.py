"""Virtual time: what happens next, in order, as fast as the machine can go.

Knows times and callbacks; knows nothing of what they do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


def first_from(start_s: float, every_s: float, until_s: float) -> float:
    """The first of start_s, start_s + every_s, ... that is not before `until_s`, as if added one by one.

    To the last bit where every_s is a power of two, as it has to be; O(log until_s). Below the next power
    of two such sums are exact, so many of them are one product; only the sum that gets there may be rounded.
    """
    time_s = start_s
    while time_s < until_s:
        limit_s = min(until_s, 2.0 ** math.frexp(time_s)[1])
        time_s += max(0, math.ceil((limit_s - time_s) / every_s) - 1) * every_s
        time_s += every_s
    return time_s


class EventQueue:
    """A clock that jumps from event to event. Events of one time come in the order they were made."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the start
        self.num_events = 0  # that have happened
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._made = 0

    def __call__(self) -> float:
        """The time, for whoever takes a clock."""
        return self.now

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Call `action(*arguments)` then. A time that has passed means now, after what is due already."""
        self._made += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._made, action, arguments))

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heapq.heappop(self._heap)
        self.num_events += 1
        action(*arguments)
        return True
