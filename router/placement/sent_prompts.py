"""Prompts that were sent to replicas and have no first token yet, by whose they are.

An engine serves tenants by turns (`cache/tenant_shares.py`): what others have queued there is before a
request only as far as it is their turn before it is computed. By start-time fair queueing's tags:

    of another tenant's tokens there, before it   min(those, (tag + own tokens / share - its tag) * its share)

Knows replicas, tenants and tokens; knows neither blocks nor seconds. Other Routers' are taken to be alike.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver


class _Sent(NamedTuple):
    replica_id: ReplicaId
    tenant: str
    tokens: int


class _Queued:
    """A tenant's at one replica."""

    __slots__ = ("share", "tokens")

    def __init__(self) -> None:
        self.share, self.tokens = 1.0, 0


class SentPrompts(SilentObserver):
    """Told of each decision, each first token and each end."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, _Sent] = {}
        self._queued: dict[ReplicaId, dict[str, _Queued]] = {}  # none without a token

    def __len__(self) -> int:
        return len(self._by_id)

    def is_of_others(self, tenant: str) -> bool:
        """Whether any of them is another tenant's. O(replicas) while all are its own."""
        return any([len(queued) > 1 or tenant not in queued for queued in self._queued.values()])

    def before(
        self, replica_id: ReplicaId, tenant: str, num_tokens: int, share: float, tag: Callable[[str], float]
    ) -> float:
        """Of what is queued there, the part that is computed before so many tokens of that tenant; 0 to 1.

        tag: what a tenant has had, for its share. O(tenants there).
        """
        queued = self._queued.get(replica_id)
        if queued is None or (tenant in queued and len(queued) == 1):
            return 1.0
        done_at = tag(tenant) + num_tokens / share
        total = before = 0.0
        for name, of in queued.items():
            total += of.tokens
            turn = of.tokens if name == tenant else (done_at - tag(name)) * of.share
            before += min(max(0.0, turn), of.tokens)
        return before / total

    # --- RoutingObserver ----------------------------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self._drop(query.request_id)
        num_tokens = record.shape.num_prompt_tokens - record.cached_tokens
        self._by_id[query.request_id] = _Sent(record.replica_id, query.tenant, num_tokens)
        of = self._queued.setdefault(record.replica_id, {}).setdefault(query.tenant, _Queued())
        of.share = query.share
        of.tokens += num_tokens

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        self._drop(request_id)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], num_output_tokens: int) -> None:
        self._drop(request_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._queued.pop(replica_id, None)
        for request_id in [name for name, sent in self._by_id.items() if sent.replica_id == replica_id]:
            del self._by_id[request_id]

    def _drop(self, request_id: RequestId) -> None:
        sent = self._by_id.pop(request_id, None)
        if sent is None:
            return
        queued = self._queued[sent.replica_id]
        queued[sent.tenant].tokens -= sent.tokens
        if not queued[sent.tenant].tokens:
            del queued[sent.tenant]
            if not queued:
                del self._queued[sent.replica_id]
