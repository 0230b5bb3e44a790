"""Send each request where it costs the fleet the least time: the default policy.

Argmin of `router.cost`; near-ties go to the less loaded of two drawn at random, so that several
routers with the same view do not all pick the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.cost import Candidate, RequestShape, costs
from router.policies.base import Scored


class ExpectedTime:
    name = "expected_time"
    uses_prefix = True

    def __init__(self, *, near_tie: float, rng: random.Random) -> None:
        """near_tie: share of the best cost within which costs count as equal."""
        self._near_tie = near_tie
        self._rng = rng

    def rank(self, candidates: Sequence[Candidate], shape: RequestShape) -> list[Scored]:
        scored = [Scored(*pair) for pair in zip(candidates, costs(candidates, shape), strict=True)]
        scored.sort(key=_order)
        best = self._draw(self._near_ties(scored))
        if best is not scored[0]:
            scored.remove(best)
            scored.insert(0, best)
        return scored

    def _near_ties(self, scored: list[Scored]) -> list[Scored]:
        """Those as good as the first. Holding less of the prompt is never as good: the draw must not
        trade a prefix hit for nothing."""
        first = scored[0]
        limit = _cost(first) * (1.0 + self._near_tie)
        held = first.candidate.cached_tokens
        return [s for s in scored if _cost(s) <= limit and s.candidate.cached_tokens >= held]

    def _draw(self, ties: list[Scored]) -> Scored:
        if len(ties) > 2:
            ties = self._rng.sample(ties, 2)
        return min(ties, key=_load)


def _cost(scored: Scored) -> float:
    assert scored.cost is not None
    return scored.cost


def _order(scored: Scored) -> tuple[float, int]:
    return _cost(scored), scored.candidate.load.last_chosen


def _load(scored: Scored) -> tuple[int, float, int]:
    """Fewer requests, then less work, then longest not chosen: idle replicas take turns."""
    load = scored.candidate.load
    return load.num_requests, load.backlog_s, load.last_chosen
