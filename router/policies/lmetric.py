"""Tokens to compute times requests after this one: no constants, no units.

Source: LMetric, "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling"
(arXiv 2603.15202): new prefill tokens * (batch size + 1), least wins; the batch is what the instance has,
running and waiting. Ties at random.
Not represented: nothing; its counts come from the router's own view there and are fresher here.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.ranking import by_cost, num_requests
from router.pricing.cost import Candidate


class Lmetric(StatelessPolicy):
    name = "lmetric"
    uses_prefix = True

    def __init__(self, context: PolicyContext, options: object) -> None:
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        num_tokens = request.shape.num_prompt_tokens
        costs = [
            float((num_tokens - candidate.cached_tokens) * (num_requests(candidate) + 1))
            for candidate in candidates
        ]
        return by_cost(candidates, costs, self._rng)
