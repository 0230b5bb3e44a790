"""Keep a session where it is: a consistent hash ring over what the client says its requests have in common.

Source: vLLM production-stack a6c01db0 (2026-08-05), `--routing-logic session`: `uhashring` on the session
header; a request without a session goes to the lowest rate of the last minute. 160 points per replica, as
`uhashring` has by default (it hashes with MD5, this with xxHash64: another ring of the same kind).
The header is `x-session-id` (there, whatever `--session-key` says).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.hash_ring import HashRing, position
from router.policies.indexes.request_rate import RequestRate
from router.policies.options import check_range
from router.policies.ranking import by_cost
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate

RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class SessionAffinityOptions:
    replication: int = 160  # points on the ring per replica

    def __post_init__(self) -> None:
        check_range(self, replication=(1, 10_000))


class SessionAffinity(StatefulPolicy):
    name = "session_affinity"
    uses_prefix = False
    Options = SessionAffinityOptions

    def __init__(self, context: PolicyContext, options: SessionAffinityOptions) -> None:
        self._placement = SessionPlacement(context, options.replication)

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        return self._placement.rank(candidates, request)

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._placement.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._placement.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self._placement.record(replica_id)


class SessionPlacement:
    """By session where there is one, else by the rate of the last minute."""

    def __init__(self, context: PolicyContext, replication: int) -> None:
        self._clock = context.clock
        self._ring = HashRing(replication)
        self._rate = RequestRate(RATE_WINDOW_S)

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        """Clockwise from the session's place: if the first refuses, the next is where its key would go."""
        session = request.prompt.session if request.prompt is not None else None
        if session is None:
            now = self._clock()
            return by_cost(candidates, [self._rate.num_requests(c.replica_id, now) for c in candidates])
        return clockwise(self._ring, position(session), candidates)

    def add(self, replica_id: ReplicaId) -> None:
        self._ring.add(replica_id)
        self._rate.add(replica_id)

    def remove(self, replica_id: ReplicaId) -> None:
        self._ring.remove(replica_id)
        self._rate.remove(replica_id)

    def record(self, replica_id: ReplicaId) -> None:
        self._rate.record(replica_id, self._clock())


def clockwise(ring: HashRing, key: int, candidates: Sequence[Candidate]) -> list[Scored]:
    """Candidates in the ring's order from `key`; those the ring does not know come last."""
    by_id = {candidate.replica_id: candidate for candidate in candidates}
    order = [by_id.pop(replica_id) for replica_id in ring.walk(key) if replica_id in by_id]
    return [Scored(candidate, None) for candidate in [*order, *by_id.values()]]
