"""The contract of a routing policy: values in, an order out.

A policy sees only replicas that may be chosen (`Routing` has dropped excluded, draining and full ones).
Knows tokens and load; knows neither hashes, sockets nor how a request gets there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cache.types import ReplicaId
from router.cost import Candidate, RequestShape


class Scored(NamedTuple):
    """A candidate with its cost: less is better. The unit is the policy's; None if it does not count."""

    candidate: Candidate
    cost: float | None

    @property
    def replica_id(self) -> ReplicaId:
        return self.candidate.replica_id


class Policy(Protocol):
    """Orders candidates. May draw at random; changes nothing it is given; does not block."""

    @property
    def name(self) -> str: ...

    @property
    def uses_prefix(self) -> bool:
        """Whether what a replica holds can change the order."""

    def rank(self, candidates: Sequence[Candidate], shape: RequestShape) -> list[Scored]:
        """Every candidate once, best first. O(n log n)."""
