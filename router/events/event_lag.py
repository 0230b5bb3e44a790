"""How long events take from publication to application, measured without a common clock.

Sender and receiver each read a monotonic clock of their own, so a difference of two readings is the delay
plus an unknown offset. The smallest difference seen lately is taken for the offset with no delay; what
exceeds it is lag. (The base delay of LEDBAT, RFC 6817.) So lag counts queueing, at either end or on the
way, and not the network's own fraction of a millisecond.

Pure arithmetic: times come in by argument. Owner: the router's event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left

# Forgotten after one to two of these, so that clocks that drift by a hundredth of a per mille stay within
# some milliseconds; a lag that stood still for longer would be taken for the offset.
WINDOW_S = 600.0

LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LagMeter:
    """One sender's."""

    def __init__(self) -> None:
        self.last_s = 0.0  # the lag of the latest event
        self._window_ends_s = -math.inf
        self._offset_s = math.inf  # smallest difference in this window
        self._older_offset_s = math.inf  # and in the one before

    def lag_s(self, sent_s: float, now_s: float) -> float:
        """Of an event sent at `sent_s` on the sender's clock, applied at `now_s` on ours. Never negative."""
        if now_s >= self._window_ends_s:
            self._older_offset_s, self._offset_s = self._offset_s, math.inf
            self._window_ends_s = now_s + WINDOW_S
        self._offset_s = min(self._offset_s, now_s - sent_s)
        self.last_s = now_s - sent_s - min(self._offset_s, self._older_offset_s)
        return self.last_s

    def forget(self) -> None:
        """Another sender with another clock: after an engine's restart."""
        self.last_s = 0.0
        self._window_ends_s = -math.inf
        self._offset_s = self._older_offset_s = math.inf


class LagCounts:
    """How many events had how much lag; all senders together, for a histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LAG_BUCKETS_S) + 1)  # the last one: above all bounds
        self.sum_s = 0.0

    def add(self, lag_s: float) -> None:
        self.counts[bisect_left(LAG_BUCKETS_S, lag_s)] += 1
        self.sum_s += lag_s
