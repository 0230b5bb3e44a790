"""A `Routing` that times its parts: what a decision costs the router's event loop, and where.

Knows the steps of a decision and a clock; decides nothing of its own. The plain `Routing` stays free of
clocks that only watch, for simulations and benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache.types import HashHint, ReplicaId
from router.placement.decision import Decision, Placement, RouteQuery
from router.placement.routing import Routing
from router.placement.weighing import NOBODY, Ahead

Observe = Callable[[float], object]
"""Takes seconds."""


class TimedRouting(Routing):
    """Tells `match`, `rank` and `book` how long each of these took, failed ones included."""

    def __init__(self, *args: Any, match: Observe, rank: Observe, book: Observe, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tell_match, self._tell_rank, self._tell_book = match, rank, book
        self._match_s = 0.0  # within the present `weigh`

    def weigh(self, query: RouteQuery, *, earlier: Decision | None = None, ahead: Ahead = NOBODY) -> Decision:
        self._match_s, began_s = 0.0, time.perf_counter()
        try:
            return super().weigh(query, earlier=earlier, ahead=ahead)
        finally:
            elapsed_s = time.perf_counter() - began_s
            self._tell_match(self._match_s)
            self._tell_rank(elapsed_s - self._match_s)

    def book(self, decision: Decision) -> Placement:
        began_s = time.perf_counter()
        try:
            return super().book(decision)
        finally:
            self._tell_book(time.perf_counter() - began_s)

    def _match(self, hints: Sequence[HashHint], now: float) -> Mapping[ReplicaId, int]:
        began_s = time.perf_counter()
        try:
            return super()._match(hints, now)
        finally:
            self._match_s += time.perf_counter() - began_s
