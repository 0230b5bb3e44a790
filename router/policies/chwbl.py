"""Consistent hashing with bounded loads on how the user's first message begins.

Source: KubeAI 2f32ef4 (2025-07-06), `PrefixHash`: xxHash64 of the first 100 characters of the first user
message (the system prompt is skipped; a completion's prompt as it is), 256 points per replica; from the
key's place clockwise, the first replica whose requests are within 1.25 times the mean as it would be with
this one, (all + 1) / replicas; if none is, the first. Bounded loads: Mirrokni et al. 2018. In-flight
requests are those of this router, as there.
Not represented: the adapter in the key; the retry that picks the same target again. Where only blocks are
known, the system prompt is what most prompts begin with, and the key is the block after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.hash_ring import HashRing, position
from router.policies.options import check_range
from router.policies.prompt_parts import SharedBeginning
from router.policies.ranking import num_in_flight
from router.policies.session_affinity import clockwise
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class ChwblOptions:
    prefix_chars: int = 100  # of the first user message
    replication: int = 256  # points on the ring per replica
    load_factor: float = 1.25  # of the mean load: the bound

    def __post_init__(self) -> None:
        check_range(self, prefix_chars=(1, 1_000_000), replication=(1, 10_000), load_factor=(1.0, 100.0))


class Chwbl(StatefulPolicy):
    name = "chwbl"
    uses_prefix = False
    Options = ChwblOptions

    def __init__(self, context: PolicyContext, options: ChwblOptions) -> None:
        self._prefix_chars = options.prefix_chars
        self._load_factor = options.load_factor
        self._ring = HashRing(options.replication)
        self._beginning = SharedBeginning()

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        order = clockwise(self._ring, self._key(request), candidates)
        total = sum([num_in_flight(candidate) for candidate in candidates])
        bound = (total + 1) / len(candidates) * self._load_factor
        for index, scored in enumerate(order):
            if not total or num_in_flight(scored.candidate) <= bound:
                return [scored, *order[:index], *order[index + 1 :]]
        return order

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._ring.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._ring.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self._beginning.observe(request.hints)

    def _key(self, request: PolicyRequest) -> int:
        text = request.prompt.first_user_text if request.prompt is not None else ""
        if text:
            return position(text[: self._prefix_chars])
        # A hash already, but of the engine's making: hashed again, it is evenly spread whatever made it.
        return position(str(self._beginning.first_own_block(request.hints)))
