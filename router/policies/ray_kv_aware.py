"""Ray Serve's KV-aware router: Dynamo's selection, asked from inside Ray.

Source: Ray 2.60.0, `KVAwareRouter` (alpha): tokenizes in the ingress and asks an in-process Dynamo
SelectionService, so formula and defaults are `dynamo_kv`'s; a request whose tokens it lacks goes to a replica
at random.
Not represented: prompts cut at 256 KiB of body; bookings that other ingresses may miss.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyRequest, Scored
from router.policies.dynamo_kv import DynamoKv
from router.pricing.cost import Candidate


class RayKvAware(DynamoKv):
    name = "ray_kv_aware"

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        if not any(candidate.is_matched for candidate in candidates):  # nobody's tokens can be compared
            drawn = self._rng.sample(candidates, len(candidates))
            return [Scored(candidate, None) for candidate in drawn]
        return super().rank(candidates, request)
