"""Prompts alike in most of their parts to one replica: a similarity hash instead of an index.

Source: vLLM production-stack issue 59 (RFC "prefix-cache-aware routing", 2025-02): SimHash (Charikar 2002)
of the prompt, 64 bits, placed on a ring of servers, so that prompts with most features in common go
together. A proposal that its author found to work poorly; it was not built. No index, no load. The
fingerprint itself is the place on the ring, so that prompts that differ in low bits stay neighbours.
Not represented: its features are runs of four characters; here they are the prompt's blocks, so what
is alike after a difference does not count. A prompt shorter than a block is placed at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.hash_ring import HashRing
from router.policies.options import check_range
from router.policies.session_affinity import clockwise
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate

_BITS = 64
_LANE = 32  # bits per counter: features of one prompt are fewer than 2^32
# The bits of a byte, each in a lane of its own.
_SPREAD = tuple(
    sum([1 << (_LANE * bit) for bit in range(8) if byte >> bit & 1], start=0) for byte in range(256)
)


@dataclass(frozen=True, slots=True)
class ProdstackSimhashOptions:
    replication: int = 160  # points on the ring per replica

    def __post_init__(self) -> None:
        check_range(self, replication=(1, 10_000))


class ProdstackSimhash(StatefulPolicy):
    name = "prodstack_simhash"
    uses_prefix = False
    Options = ProdstackSimhashOptions

    def __init__(self, context: PolicyContext, options: ProdstackSimhashOptions) -> None:
        self._ring = HashRing(options.replication)
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        key = simhash(request.hints) if request.hints else self._rng.getrandbits(_BITS)
        return clockwise(self._ring, key, candidates)

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._ring.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._ring.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        """Nothing is remembered of requests."""


def simhash(features: Sequence[HashHint]) -> int:
    """64 bits, each what most features have there; a tie is 0."""
    lanes = [0] * 8  # per byte of a feature, eight counters side by side in one integer
    spread = _SPREAD
    for feature in features:
        for index, byte in enumerate(feature.to_bytes(8, "little")):
            lanes[index] += spread[byte]
    mask, half = (1 << _LANE) - 1, len(features) / 2
    return sum(
        [
            1 << (8 * index + bit)
            for index, lane in enumerate(lanes)
            for bit in range(8)
            if lane >> (_LANE * bit) & mask > half
        ]
    )
