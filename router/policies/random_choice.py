"""Draw a replica at random: the baseline that knows nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.pricing.cost import Candidate


class RandomChoice(StatelessPolicy):
    name = "random"
    uses_prefix = False

    def __init__(self, context: PolicyContext, options: object) -> None:
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        return [Scored(candidate, None) for candidate in self._rng.sample(candidates, len(candidates))]
