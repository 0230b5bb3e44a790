"""Ray Serve's own prefix-affinity request router, on our replicas: one adapter that shows it the prompt.

Everything it decides with is Ray's: its tree of text in an actor, its thresholds, its blocking calls to that
actor. The adapter only
- turns a prompt's token ids into text, one character each: equal beginnings stay equal, and the class
  compares shares of characters only;
- tells our Router what `router/request_router.py` would tell it: which replicas there are, and who accepted.

Ray's defaults (`imbalanced_threshold` infinite, no eviction) are kept unless `request_router_kwargs` say
otherwise. Differs from its home in one thing: its blocking calls block our Router's one event loop.
Written against ray 2.60: the class is private. Source: ray.llm, PrefixCacheAffinityRouter.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from cache.messages import GenerateRequest, ReplicaInfo
from cache.types import ReplicaId
from router.placement.registry import get_routing
from router.request_router import METADATA_KEY

ROUTING_KEY = "warmpath"  # `router.ingress.ROUTING_KEY`, which cannot be imported without a web framework
_FIRST_CHARACTER = 0x100  # beyond it and below the surrogates, every token id of a small vocabulary has one
_SURROGATES = range(0xD800, 0xE000)


class RayPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]  # ray has no types for it
    """One per process and handle, on the event loop of the handle's owner."""

    def initialize_state(self, routing_key: str = ROUTING_KEY, **kwargs: Any) -> None:
        """kwargs: PrefixCacheAffinityRouter's own."""
        self._routing = get_routing(routing_key)
        super().initialize_state(**kwargs)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._routing.update_replicas(
            {
                ReplicaId(replica.replica_id.unique_id): ReplicaInfo.from_json(
                    replica.replica_metadata[METADATA_KEY]
                )
                for replica in replicas
            }
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._routing.replica_lost(ReplicaId(replica_id.unique_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray's choice for a generation; anybody for any other call."""
        if _generation(pending_request) is None:
            return [candidate_replicas]
        chosen: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        return chosen

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request = _generation(pending_request)
        if request is not None:
            super().on_request_routed(pending_request, replica_id, result)
            self._routing.routed(request.request_id, ReplicaId(replica_id.unique_id))

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        """What Ray's class reads from `.prompt` or `.messages` of a call's argument."""
        request = _generation(pending_request)
        assert request is not None, "asked for generations only"
        return text_of(request.token_ids[: request.num_prompt_tokens])


def text_of(token_ids: Any) -> str:
    """One character a token; token ids: integers from 0 to about a million."""
    return "".join(map(_character, token_ids))


def _character(token_id: int) -> str:
    code = _FIRST_CHARACTER + token_id
    return chr(code if code < _SURROGATES.start else code + len(_SURROGATES))


def _generation(pending_request: PendingRequest | None) -> GenerateRequest | None:
    request = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return request if isinstance(request, GenerateRequest) else None
