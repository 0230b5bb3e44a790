"""Tokens to compute times requests after this one: no constants, no units.

Source: LMetric, "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling"
(arXiv 2603.15202): prefill tokens * (batch size + 1), least wins; the batch is what the instance has,
running and waiting. Ties at random. Prefill tokens are the request's new ones and, in the authors' router
(blitz-router, `lmetric-q`, 2026), those that the instance has queued. The abstract speaks of new ones alone,
and SGLang's port counts no others: `count_queued: false`.
Not represented: nothing; its counts come from the router's own view there and are fresher here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.ranking import by_cost, num_requests
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class LmetricOptions:
    count_queued: bool = True  # what a replica has queued counts as tokens to compute, too


class Lmetric(StatelessPolicy):
    name = "lmetric"
    uses_prefix = True
    Options = LmetricOptions

    def __init__(self, context: PolicyContext, options: LmetricOptions) -> None:
        self._rng = context.rng
        self._count_queued = options.count_queued

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        num_tokens = request.shape.num_prompt_tokens
        costs = [
            float(self._tokens(candidate, num_tokens) * (num_requests(candidate) + 1))
            for candidate in candidates
        ]
        return by_cost(candidates, costs, self._rng)

    def _tokens(self, candidate: Candidate, num_prompt_tokens: int) -> int:
        new = num_prompt_tokens - candidate.cached_tokens
        return new + candidate.load.queued_tokens if self._count_queued else new
