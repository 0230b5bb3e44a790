"""The hooks of a policy that remembers: it must say what joining, leaving and routing mean to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.policies.base import PolicyRequest


class StatefulPolicy(ABC):
    """A base for policies with a memory."""

    @abstractmethod
    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None: ...

    @abstractmethod
    def replica_removed(self, replica_id: ReplicaId) -> None: ...

    @abstractmethod
    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None: ...

    def finished(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:  # noqa: B027  # on purpose
        """Nothing: what was generated enters none of the sources' indexes."""
