"""Take turns, whatever the load or the cache: the baseline every other policy is measured against.

The turn is the candidate not chosen for longest, so replicas may come and go without a skipped turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.pricing.cost import Candidate


class RoundRobin(StatelessPolicy):
    name = "round_robin"
    uses_prefix = False

    def __init__(self, context: PolicyContext, options: object) -> None:
        """Nothing to remember, nothing to set."""

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        turns = sorted(candidates, key=lambda candidate: (candidate.load.last_chosen, candidate.replica_id))
        return [Scored(candidate, None) for candidate in turns]
