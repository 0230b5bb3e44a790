"""Who may watch decisions and what came of them: accounting, recording, shadow policies.

Knows the shape of what happens to a request; knows no watcher. Everything is called on the router's event
loop, right where it happens; a watcher must not block, and has to keep what it wants to remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache.events import EventBatch
from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.policies import PolicyRequest


class RoutingObserver(Protocol):
    """One request: `decided`, per attempt, and `moved` if another replica took it; then, if a token came of
    it, `first_token`; at last `finished`."""

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        """It may be chosen from now on. Whoever begins to watch is told of those that are there."""

    def replica_removed(self, replica_id: ReplicaId) -> None:
        """It is gone."""

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        """hints: chain of the query's full blocks, parent first."""

    def moved(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        """That replica accepted the request, and not the one it was last said to be at."""

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        """That replica computed the first token and says how much of the prompt it had cached."""

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        """The request is over, however it ended. Once, after all attempts.

        hints: chain of the full blocks of prompt and output, () if unknown. answers: tokens of each.
        """

    def refused(self, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        """Instead of all that: no replica was found for it, or not before its time or its client's was over.

        hints: chain of the query's full blocks, parent first.
        """

    def events(self, replica_id: ReplicaId, events: EventBatch) -> None:
        """What has changed in the replica's cache is in the index now. Not told of snapshots."""


class SilentObserver:
    """Watches nothing: a base for watchers of a part."""

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        pass

    def replica_removed(self, replica_id: ReplicaId) -> None:
        pass

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        pass

    def moved(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        pass

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        pass

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        pass

    def refused(self, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        pass

    def events(self, replica_id: ReplicaId, events: EventBatch) -> None:
        pass
