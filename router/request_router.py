"""Serve's routing hook on the replica deployment: maps decisions made elsewhere to Serve's replicas.

    ingress: Routing.choose ──> GenerateRequest.ranks ──> choose_replicas ──> [[best], [second], ...]
    Serve:   replica set ──> update_replicas ──> Routing      accepted ──> on_request_routed ──> Routing

Decides nothing itself. Serve calls `choose_replicas` again after every rejection or back-off and may take
any rank, so nothing is booked here; `on_request_routed` names the replica that accepted.
No module-level state: Serve ships this module by value, and its imports by reference. What a process
shares is found through `router.placement.registry.get_routing`.
Written against ray 2.60: the base class is public but alpha, what is private of it is in `_fail`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cache.messages import GenerateRequest, InheritPin, ReleasePin, ReplicaInfo
from cache.types import ReplicaId
from router.errors import NoReplica
from router.placement.registry import get_routing
from router.placement.routing import Routing

METADATA_KEY = "warmpath"  # of what a replica's record_replica_metadata returns

logger = logging.getLogger(__name__)


class WarmpathRequestRouter(RequestRouter):  # type: ignore[misc]  # ray has no types for it
    """One per process and handle; lives on the event loop of the handle's owner."""

    def initialize_state(self, routing_key: str = "warmpath", **_kwargs: Any) -> None:
        """routing_key: where this process's Ingress registered its Routing."""
        self._malformed: set[str] = set()
        self._routing: Routing | None
        try:
            self._routing = get_routing(routing_key)
        except LookupError:
            # A handle opened by a script or another deployment: any replica will do for its calls.
            logger.warning("no Routing in this process: calls go to the least busy replica")
            self._routing = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Every change of the set of running replicas, from Serve's controller."""
        super().update_replicas(replicas)
        if self._routing is not None:
            self._routing.update_replicas(self._infos(replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if self._routing is not None:
            self._routing.replica_lost(_id(replica_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, best first; everybody in one rank for calls that are not generations."""
        if pending_request is None:
            return [candidate_replicas]
        is_first_pass = not pending_request.routing_context.should_backoff
        # Without this Serve asks again at once, for ever, while every rank is full.
        pending_request.routing_context.should_backoff = True
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, ReleasePin | InheritPin):
            return self._addressed(request.replica_id, candidate_replicas, pending_request)
        if self._routing is None or not isinstance(request, GenerateRequest):
            return [candidate_replicas]
        by_id = {_id(replica.replica_id): replica for replica in candidate_replicas}
        ranks = self._present(request.ranks, request, by_id) if is_first_pass else []
        # Nobody of those took it, or the best one is gone, and with it what speaks for the others' order.
        if not ranks or ranks[0] != request.ranks[0]:
            ranks = self._present(self._routing.rerank(request.request_id, list(by_id)), request, by_id)
        if not ranks:
            return self._fail(pending_request, len(request.excluded_replicas), candidate_replicas)
        return [[by_id[replica_id]] for replica_id in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica accepted the call."""
        request = pending_request.args[0] if pending_request.args else None
        if self._routing is not None and isinstance(request, GenerateRequest):
            self._routing.routed(request.request_id, _id(replica_id))

    def _present(
        self, ranks: Sequence[ReplicaId], request: GenerateRequest, by_id: dict[ReplicaId, RunningReplica]
    ) -> list[ReplicaId]:
        """The ranks that are still there and not excluded."""
        return [r for r in ranks if r in by_id and r not in request.excluded_replicas]

    def _addressed(
        self, replica_id: ReplicaId, candidates: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        """That one replica, for calls that nobody else can answer."""
        addressee = [replica for replica in candidates if _id(replica.replica_id) == replica_id]
        if not addressee:
            return self._fail(pending_request, len(candidates), candidates)
        return [addressee]

    def _fail(
        self, pending_request: PendingRequest, num_excluded: int, candidates: list[RunningReplica]
    ) -> list[list[RunningReplica]]:
        """Ends a call that nobody may take with NoReplica at its caller.

        Raising would leave the caller waiting for ever, returning no rank would ask again for ever: Serve
        ends its loop only when a rank comes back and the request's future is done. The index entry must
        go too, or the request's next call would be taken for this one.
        """
        if not pending_request.future.done():
            pending_request.future.set_exception(NoReplica(len(candidates), num_excluded))
        self._remove_pending_request_from_indices(pending_request)
        return [candidates[:1]]

    def _infos(self, replicas: list[RunningReplica]) -> dict[ReplicaId, ReplicaInfo | None]:
        """What the replicas told of themselves; None of one that told nothing readable."""
        infos: dict[ReplicaId, ReplicaInfo | None] = {}
        for replica in replicas:
            try:
                infos[_id(replica.replica_id)] = ReplicaInfo.from_json(replica.replica_metadata[METADATA_KEY])
            except (KeyError, TypeError, ValueError) as error:
                infos[_id(replica.replica_id)] = None
                self._complain_once(replica.replica_id.unique_id, error)
        return infos

    def _complain_once(self, unique_id: str, error: Exception) -> None:
        if unique_id not in self._malformed:
            self._malformed.add(unique_id)
            fields = {"replica_id": unique_id, "error_type": type(error).__name__}
            logger.warning("replica metadata is unreadable, it gets no requests", extra=fields)


def _id(replica_id: ReplicaID) -> ReplicaId:
    return ReplicaId(replica_id.unique_id)
