"""A quantile of the latest numbers, kept sorted as they come. Knows numbers; knows not what they count."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque


class RecentQuantile:
    """Of the latest `over` numbers. Each new one costs O(log over), and a memory move."""

    def __init__(self, share: float, over: int) -> None:
        """share: 0 to 1; 0.99: what 99 % of them do not exceed."""
        self._share = share
        self._over = over
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, value: float) -> None:
        if len(self._latest) == self._over:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float:
        """The smallest of them that so many do not exceed. Raises IndexError of none."""
        return self._sorted[max(0, math.ceil(self._share * len(self._sorted)) - 1)]
