"""Send to whoever has the fewest requests: least connections, as every load balancer has it.

Source: AIBrix e3e10f9e (2026-08-22), `least-request`, and KubeAI 2f32ef4 (2025-07-06), `LeastLoad`; ties at
random, as in AIBrix. They count what their own gateway has open, or what the last scrape said; here the
count is the replicas' own, seconds fresher, which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.ranking import by_cost, num_requests
from router.pricing.cost import Candidate


class LeastOutstanding(StatelessPolicy):
    name = "least_outstanding"
    uses_prefix = False

    def __init__(self, context: PolicyContext, options: object) -> None:
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        return by_cost(candidates, [num_requests(candidate) for candidate in candidates], self._rng)
