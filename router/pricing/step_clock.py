"""When one replica's steps end, as a request finds them that is sent there now.

Whoever finds nobody queued waits for the step in progress all the same, which is most of a short prompt's
time to its first token: half a step where nobody knows when it began, and much less at the best of many
replicas for who does. Engines tell of themselves between two steps, so each batch says when one begins; how
long it takes follows from what it computes, and from then on only those decode who run, in steps of one
length, until the engine says otherwise.

    sent      batch heard    boundary_at    + step_s       + step_s
    ──┼────────────┼──────────────┼─────────────┼──────────────┼──>
      └────way─────┘  what is sent until then is in the step that begins at the boundary

A batch is a moment old when it is heard, and a request under way for another one before it is there: only the
sum counts, which is how long the way there and back takes. Engines name at once who arrives inside a step, so
each of those is a measurement.
Steps of uneven length and ways of uneven length make that worthless, and a request that follows it leaves its
prefix for nothing. So each batch is held beside the boundary that was expected, and as long as they are
further apart than `MOST_OFF` of a step, in the mean and with what ways differ by, no boundary is known.

Knows seconds; knows neither requests nor costs. Owner: the router's event loop.
"""

from __future__ import annotations

import math

from router.pricing.recent_quantile import RecentQuantile

# A boundary that is missed costs a whole step more, and one that is expected too early a part of one: so the
# way counts as long as most are.
WAY_SHARE = 0.75
OVER = 32  # ways that are looked at, and batches, about
BY_CHANCE = 0.25  # of a step: so far off is in the mean who knows nothing
MOST_OFF = 0.125

UNKNOWN = -math.inf


class StepClock:
    def __init__(self) -> None:
        # What is sent by then is in the step that begins at the end of the one told of last.
        self.boundary_at = UNKNOWN
        self._ways_s = RecentQuantile(WAY_SHARE, OVER)
        self._off = BY_CHANCE  # of a step, batches from the boundary that was expected, in the mean
        self._expected_at = UNKNOWN  # a boundary; others are whole steps after it
        self._step_s = 0.0  # of those

    def arrived(self, way_s: float) -> None:
        """A request was heard of inside a step, so long after it had been sent. O(log of those)."""
        self._ways_s.add(way_s)

    def begins(self, first_s: float, step_s: float, now: float) -> None:
        """It was heard that a step of so many seconds begins, and that others of `step_s` come after it.

        0: that none does, and that none comes.
        """
        if not (first_s and len(self._ways_s)):
            self.boundary_at = self._expected_at = UNKNOWN
            return
        began_at = now - self._ways_s.value
        self._compare(began_at)
        self._expected_at, self._step_s = began_at + first_s, step_s
        off = self._off + self._ways_s.half_spread / (step_s or first_s)
        self.boundary_at = self._expected_at if off <= MOST_OFF else UNKNOWN

    def _compare(self, began_at: float) -> None:
        """With the boundaries that were expected."""
        if self._expected_at == UNKNOWN or not self._step_s:
            return
        after = (began_at - self._expected_at) / self._step_s % 1.0
        self._off += (min(after, 1.0 - after) - self._off) / OVER
