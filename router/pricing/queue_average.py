"""How long the queues have been lately. Knows numbers and times alone."""

from __future__ import annotations

import math


class QueueAverage:
    """Exponentially weighted mean of queued requests per replica: how saturated the fleet is."""

    def __init__(self, time_constant_s: float = 5.0) -> None:
        self._time_constant_s = time_constant_s
        self._mean = 0.0
        self._updated_at: float | None = None

    def update(self, queued_per_replica: float, now: float) -> float:
        """The mean after this observation, held since the last one."""
        if self._updated_at is None:
            self._mean = queued_per_replica
        else:
            kept = math.exp(-max(0.0, now - self._updated_at) / self._time_constant_s)
            self._mean = kept * self._mean + (1.0 - kept) * queued_per_replica
        self._updated_at = now
        return self._mean
