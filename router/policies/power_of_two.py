"""Draw two at random and take the one with fewer requests.

Source: Mitzenmacher 2001; Ray Serve 2.60's default request router. Ray asks both for their queue length,
or takes an answer up to 10 s old; here the counts are the replicas' own, which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.ranking import two_random_choices
from router.pricing.cost import Candidate


class PowerOfTwo(StatelessPolicy):
    name = "power_of_two"
    uses_prefix = False

    def __init__(self, context: PolicyContext, options: object) -> None:
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        return two_random_choices(candidates, self._rng)
