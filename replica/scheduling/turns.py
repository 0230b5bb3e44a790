"""Whose prompt is next: of those that wait, and of those that have begun.

First the tenant that has had least (`cache/tenant_shares.py`), then its requests in their order. A prompt
that has begun goes before those of its tenant that wait, unless the order lets it stand back for a shorter
one, or a more urgent one goes before it; for another tenant's turn it always does, and keeps its blocks.
Knows requests, places and shares; knows neither blocks nor budgets. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cache.scheduling_order import SchedulingOrder
from cache.tenant_shares import TenantShares
from replica.scheduling.request import Request, RequestState
from replica.scheduling.waiting_queue import WaitingQueue

CREDIT_STEPS = 32  # full steps' tokens: a burst of somewhat more than its part is served at once
# Of all places, as many stay free for tenants that have less than their part, once there are several.
KEPT_PLACES = 1 / 8


class Turns:
    """Owns those that wait."""

    def __init__(self, order: SchedulingOrder, max_batched_tokens: int) -> None:
        self.waiting = WaitingQueue()
        self._preempts = order.preempts
        self._shares = TenantShares(CREDIT_STEPS * max_batched_tokens)

    def begin_step(self, begun: Sequence[Request]) -> None:
        """A step is about to be planned. begun: those in the middle of their prompt, oldest first."""
        self._shares.contend(self.waiting.tenants.union([request.tenant for request in begun]))

    def places(self, tenant: str, running: Sequence[Request], places: int) -> int:
        """How many of all places may be taken when it is that tenant's turn.

        Who has more than its part of them leaves some to others: a tenant that comes now and then would else
        wait for an answer of the other's to end. O(running) where there are several.
        """
        num_tenants = self._shares.num_recent()
        if num_tenants < 2 or sum([r.tenant == tenant for r in running]) < places // num_tenants:
            return places
        return self.most_places(places)

    def most_places(self, places: int) -> int:
        """How many of all places one tenant's sequences may come to take."""
        return places if self._shares.num_recent() < 2 else max(1, places - int(KEPT_PLACES * places))

    def next(
        self, begun: Sequence[Request], *, admits: bool, without: Collection[str] = ()
    ) -> Request | None:
        """Whose turn it is of `begun` and, where somebody may start, of those that wait; None: nobody's.

        begun: of those given to `begin_step`, who has no part in this step yet. without: tenants of which
        nobody may start. O(begun + tenants).
        """
        running = [request for request in begun if request.state is RequestState.RUNNING]
        tenants = {request.tenant for request in running}
        if admits:
            tenants |= self.waiting.tenants.difference(without)
        firsts = [
            self._first_of(tenant, running, admits=admits and tenant not in without) for tenant in tenants
        ]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        return min(firsts, key=lambda request: (self._shares.turn(request.tenant), request.place))

    def ahead(self, tenant: str) -> float:
        """Tokens, for its share, that it has had beyond what a newcomer would be given."""
        return self._shares.ahead(tenant)

    def charge(self, request: Request, end: int) -> None:
        """Its tokens before `end`: each once, whoever was thrown out and had to be computed anew."""
        if end > request.num_charged:
            self._shares.charge(request.tenant, end - request.num_charged, request.share)
            request.num_charged = end

    def _first_of(self, tenant: str, running: Sequence[Request], *, admits: bool) -> Request:
        own = [request for request in running if request.tenant == tenant]
        begun = min(own, key=lambda request: request.place) if own else None
        waiting = self.waiting.first(tenant) if admits else None
        if begun is None:
            assert waiting is not None, "a tenant of those that want to go on, or may start"
            return waiting
        if waiting is None or begun.place < waiting.place:
            return begun
        return waiting if self._preempts or waiting.priority < begun.priority else begun
