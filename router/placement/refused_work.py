"""How much work was refused lately, beside what was placed: what replicas more would have to do.

    ratio = engine seconds refused / engine seconds placed

Where somebody is refused the replicas do what they can, and that is what was placed: so as many more would be
needed as are there, times the ratio. Of several Routers each tells its own along with what it places, and in
the mean of what they place that is the ratio of all of them. Clients that come back at once are refused, and
count, more than once: never as more than `MOST`.

Pure. Knows seconds and times; knows neither requests nor why they were refused.
Owner: the router's event loop.
"""

from __future__ import annotations

import math

MEMORY_S = 10.0  # in which all but a third is forgotten; replicas take longer than that to come
MOST = 4.0  # no more than twice the replicas are wanted at once, for which less would do


class RefusedWork:
    """Two sums, each worth less by and by."""

    def __init__(self) -> None:
        self._refused_s = 0.0
        self._placed_s = 0.0
        self._at = -math.inf  # the moment that both are of

    def refused(self, engine_s: float, now: float) -> None:
        """So much of a replica's time was asked for in vain."""
        self._age(now)
        self._refused_s += engine_s

    def placed(self, engine_s: float, now: float) -> None:
        """So much of a replica's time was asked for, and is given."""
        self._age(now)
        self._placed_s += engine_s

    def not_taken(self, engine_s: float, now: float) -> None:
        """So much of what counts as placed was not done: the engine it was sent to refused it."""
        self._age(now)
        self._placed_s = max(0.0, self._placed_s - engine_s)

    @property
    def ratio(self) -> float:
        """0 while nothing is refused, at most `MOST`."""
        if self._refused_s >= MOST * self._placed_s:
            return MOST if self._refused_s else 0.0
        return self._refused_s / self._placed_s

    def _age(self, now: float) -> None:
        kept = math.exp(min(0.0, self._at - now) / MEMORY_S)
        self._refused_s *= kept
        self._placed_s *= kept
        self._at = now
