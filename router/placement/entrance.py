"""Who may be held, and who no longer: asked of each newcomer, and in overload of those who wait.

Who would wait too long is refused with AllBusy (`admission.py`), and so is who comes when
`max_held_per_replica` are here, which guards memory. Whoever was taken in is past the age floor after half of
the longest wait at the latest, and then nobody goes first who came later. Once it is known that more keeps
coming than is served, those who were let in before that and have waited one and a half times as long as
anybody may from then on are refused as well: served first, they would make everybody after them as late as
they are. Prompts of one HTTP request are so together, and only before any of them has a replica. Overload is
not held against a tenant that asks for no more than its part (`tenant_demand.py`).

Knows the queue, seconds and tenants; knows neither clocks nor where anybody goes. Owner: the router's event
loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from router.errors import AllBusy
from router.placement.admission import Admission
from router.placement.deciding import Deciding
from router.placement.held_queue import HeldQueue
from router.placement.held_request import HeldRequest
from router.placement.hold_options import AGED, HoldOptions
from router.placement.tenant_demand import TenantDemand


class Entrance:
    """One queue's; whoever keeps the queue lets in and out."""

    def __init__(
        self,
        routing: Deciding,
        options: HoldOptions,
        admission: Admission,
        demand: TenantDemand,
        queue: HeldQueue,
    ) -> None:
        self._routing = routing
        self._options = options
        self._admission = admission
        self._demand = demand
        self._queue = queue

    def check_places(self, held: HeldRequest, num_replicas: int) -> None:
        """Raises AllBusy where as many are held as may be. num_replicas: that may be chosen."""
        shared = max(1, num_replicas)
        if self._is_full(held.tenant, self._options.max_held_per_replica * shared):
            mean_s = self._queue.engine_s / max(1, len(self._queue))
            raise self._admission.refusal(mean_s / shared, mean_s, shared, held.query.part)

    def check_wait(self, held: HeldRequest, now: float, num_replicas: int) -> None:
        """Of one that has just been weighed; from now on it counts as having come. Raises AllBusy, but not
        for a prompt that came with one which was let in."""
        starts_now = held.decision is not None and held.decision.starts_now
        wait_s = 0.0 if starts_now and not self._queue else self._routing.wait_s(self._queue.engine_s)
        self._demand.came(held.tenant, held.uncached_tokens, held.query.share, now)
        prefill_s = held.decision.prefill_s if held.decision is not None else 0.0
        self._admission.came(
            prefill_s,
            num_waiting=self._queue.num_bodies,
            wait_s=wait_s,
            num_replicas=num_replicas,
            part=held.query.part,
        )
        # Only its own replica's idleness counts: an idle one that nobody wants must not let everybody in.
        if starts_now or not num_replicas or not held.query.has_to_be_admitted:
            return
        if self._options.max_wait_s < math.inf or held.deadline < math.inf:
            before_s = self._queue.seconds_before(held, in_order=False)
            self._admission.check(
                wait_s=self._routing.wait_s(before_s) if before_s < self._queue.engine_s else wait_s,
                ahead_s=self._ahead_s(held),
                own_s=held.engine_s,
                deadline=held.deadline,
                num_replicas=num_replicas,
                part=held.query.part,
                is_within_share=self._is_within_share(held, now),
            )

    def too_late(self, now: float) -> Iterator[tuple[HeldRequest, AllBusy]]:
        """In overload: whoever was taken in before it was known to be one, and has waited too long for it.

        Not who had a replica before: it may have begun to answer. Prompts of one HTTP request leave together,
        and not once one of them has a replica. Each has to leave before the next is asked for.
        """
        latest = now - (1.0 + AGED) * self._admission.bound_s
        for oldest in self._queue.came_before(latest):
            is_here = oldest.request_id in self._queue  # and has not left with one that was older
            if not is_here or not oldest.query.may_be_turned_away or self._is_within_share(oldest, now):
                continue
            for held in self._queue.together_with(oldest):
                num_replicas = max(1, self._routing.free_replicas(0.0)[0])
                room_in_s = self._routing.wait_s(self._queue.engine_s) - self._admission.bound_s
                yield held, self._admission.refusal(room_in_s, held.engine_s, num_replicas, held.query.part)

    def _ahead_s(self, held: HeldRequest) -> float:
        """Until somebody could start on it behind those that go before it; 0 for who has no deadline."""
        if held.deadline == float("inf"):
            return 0.0
        return self._routing.wait_s(self._queue.seconds_before(held, in_order=True))

    def _is_within_share(self, held: HeldRequest, now: float) -> bool:
        """In overload: whether others ask for too much, and its tenant does not."""
        return self._admission.is_overload and self._demand.is_within_share(held.tenant, now)

    def _is_full(self, tenant: str, most: int) -> bool:
        """Where others have filled it a tenant may still have what would be its part, were it divided equally
        among those that wait: so at most twice as many are held as are allowed."""
        if len(self._queue) < most:
            return False
        num_tenants = self._queue.num_tenants + (not self._queue.num_of(tenant))
        return self._queue.num_of(tenant) >= most // num_tenants
