"""Virtual time: what happens next, in order, as fast as the machine can go.

Knows times and callbacks; knows nothing of what they do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


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
