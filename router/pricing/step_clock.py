"""When one replica's steps end, as a request finds them that is sent there now.

Whoever finds nobody queued waits for the step in progress all the same, which is most of a short prompt's
time to its first token: half a step where nobody knows when it began, and much less at the best of many
replicas for who does. Engines tell of themselves between two steps, so each batch says when one begins; how
long it takes follows from what it computes, and from then on only those decode who run, in steps of one
length, until the engine says otherwise. What engines do between steps is in no fit: by how much a step takes
longer, from its beginning to the next one's, is seen from batches that follow each other.

    sent      batch heard    boundary_at    + step_s       + step_s
    ──┼────────────┼──────────────┼─────────────┼──────────────┼──>
      └────way─────┘  what is sent until then is in the step that begins at the boundary

A batch is a moment old when it is heard, and a request under way for another one before it is there: only the
sum counts, which is how long the way there and back takes. Engines name at once who arrives inside a step, so
each of those is a measurement.

Knows seconds; knows neither requests nor costs. Owner: the router's event loop.
"""

from __future__ import annotations

import math

from router.pricing.recent_quantile import RecentQuantile

# A boundary that is missed costs a whole step more, and one that is expected too early a part of one: so the
# way counts as long as most are.
WAY_SHARE = 0.75
OVER = 32  # ways that are looked at, and steps, about

UNKNOWN = -math.inf


class StepClock:
    def __init__(self) -> None:
        # What is sent by then is in the step that begins at the end of the one told of last.
        self.boundary_at = UNKNOWN
        self.pace = 1.0  # times as long as the fit has it, from one step's beginning to the next one's
        self._ways_s = RecentQuantile(WAY_SHARE, OVER)
        self._began_at = UNKNOWN  # the step told of last, by this router's clock
        self._first_s = 0.0  # of that one, by the fit
        self._step_s = 0.0  # of those after it

    def arrived(self, way_s: float) -> None:
        """A request was heard of inside a step, so long after it had been sent. O(log of those)."""
        self._ways_s.add(way_s)

    def begins(self, first_s: float, step_s: float, now: float) -> None:
        """It was heard that a step of so many seconds begins, and that others of `step_s` come after it.

        0: that none does, and that none comes. By the fit.
        """
        if self._began_at != UNKNOWN:
            self._compare(now - self._began_at)
        self._began_at, self._first_s, self._step_s = now if first_s else UNKNOWN, first_s, step_s
        if first_s and len(self._ways_s):
            self.boundary_at = now - self._ways_s.value + self.pace * first_s
        else:
            self.boundary_at = UNKNOWN

    def _compare(self, took_s: float) -> None:
        """With what was expected of the step that began so long ago, if it is that one that is over now."""
        expected_s = self.pace * self._first_s
        half_s = self.pace * min(self._first_s, self._step_s or self._first_s) / 2.0
        if abs(took_s - expected_s) < half_s:
            self.pace += (took_s / self._first_s - self.pace) / OVER
