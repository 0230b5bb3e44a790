"""Where a server's highest good rate lies: rates to try, one after the other. Knows no server."""

from __future__ import annotations

import math

_GROWTH = 1.5
_LEAST_SHARE = 1 / 64  # of the first rate: below it the search gives up


class RateSearch:
    """Grow until a rate fails (or shrink until one is met), then halve the gap, in proportion."""

    def __init__(self, first_per_s: float, *, precision: float = 0.08, max_tries: int = 24) -> None:
        """precision: the highest met and the lowest failed rate are this close at the end, as a share.
        max_tries: until there are both; halving the gap is over soon, wherever the search began."""
        self._first = first_per_s
        self._precision = precision
        self._tries_left = max_tries
        self._met = 0.0
        self._failed = math.inf

    @property
    def found_per_s(self) -> float:
        """The highest rate that was met; 0 if none was."""
        return self._met

    def next_rate(self) -> float | None:
        """None: the search is over."""
        if self._met and math.isfinite(self._failed):
            return self._between()
        if self._tries_left <= 0 or self._failed < self._first * _LEAST_SHARE:
            return None
        if self._met:
            return self._met * _GROWTH
        return self._first if math.isinf(self._failed) else self._failed / _GROWTH

    def tell(self, rate_per_s: float, *, is_met: bool) -> None:
        """A rate above one that failed is not believed to be met, nor one below one that was to fail."""
        self._tries_left -= 1
        if is_met:
            self._met = max(self._met, rate_per_s) if rate_per_s < self._failed else self._met
        else:
            self._failed = min(self._failed, rate_per_s) if rate_per_s > self._met else self._failed

    def _between(self) -> float | None:
        if self._failed <= self._met * (1 + self._precision):
            return None
        rate = math.sqrt(self._met * self._failed)
        return rate if self._met < rate < self._failed else None  # a precision that no number has
