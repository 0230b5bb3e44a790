"""Send each request where it costs the fleet the least time: the default policy.

Argmin of `router.cost`; near-ties go to the less loaded of two drawn at random, so that several
routers with the same view do not all pick the same replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.cost import Candidate, costs
from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.options import check_range


@dataclass(frozen=True, slots=True)
class ExpectedTimeOptions:
    near_tie: float = 0.05  # costs within this share of the best are drawn at random, less loaded of two

    def __post_init__(self) -> None:
        check_range(self, near_tie=(0.0, 1.0))


class ExpectedTime(StatelessPolicy):
    name = "expected_time"
    uses_prefix = True
    Options = ExpectedTimeOptions

    def __init__(self, context: PolicyContext, options: ExpectedTimeOptions) -> None:
        self._near_tie = options.near_tie
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        costed = zip(candidates, costs(candidates, request.shape), strict=True)
        scored = [Scored(*pair) for pair in costed]
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
