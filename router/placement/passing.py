"""What a request meets at engines that let shorter prompts by: what goes before it there, and what it passes.

Such an engine computes the shortest prompt first, however many tokens of others wait in its queue
(`cache/scheduling_order.py`). So that queue does not cost a request all of its seconds: each prompt there
makes it wait, or waits for it.

    backlog  = what goes before it, half of a mean step of that queue at least
    passed_s = own prefill seconds * prompts that it passes

docs/design/019-scheduling-order.md has what it gains.
Knows states and who waits where; books nothing. Owner: the router's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache.events import StepTimeModel
from cache.scheduling_order import SchedulingOrder
from cache.types import HashHint
from router.placement.decision import RouteQuery
from router.placement.replica_queues import ReplicaQueues
from router.pricing.cost import prefill_s
from router.pricing.replica_state import ReplicaState


class Passing:
    def __init__(self, queues: ReplicaQueues) -> None:
        self._queues = queues

    def met_by(
        self,
        query: RouteQuery,
        hints: Sequence[HashHint],
        states: list[ReplicaState],
        cached: Sequence[int],
        now: float,
    ) -> list[ReplicaState]:
        """The states as that request finds them. hints: of its full blocks. cached: usable tokens of its
        prompt that each holds.

        O(replicas, and prompts there that go before it); O(1) while nobody waits.
        """
        total, queues = query.num_prompt_tokens, self._queues
        if queues.is_empty:
            return states
        found = []
        # Mostly all are of one speed, hold the same, and order alike.
        alike: tuple[StepTimeModel, int, int, SchedulingOrder] | None = None
        own_s = own_place = 0.0
        for state, held in zip(states, cached, strict=True):
            price, queue_s, info = state.price, state.busy_until - now, state.info
            last = queues.last_place(state.replica_id, query.tenant) if queue_s > 0.0 else -math.inf
            # Without a place there it would wait for one, which nobody gives up.
            if price is None or last == -math.inf or state.num_requests >= info.max_running:
                found.append(state)
                continue
            if (price.step_time, price.room, held, info.scheduling_order) != alike:
                alike = price.step_time, price.room, held, info.scheduling_order
                own_s = prefill_s(price, total, held)
                own_place = queues.place(state.replica_id, query, own_s, now)
            place = max(own_place, queues.promised_place(state.replica_id, query, hints, held))
            if place >= last:
                found.append(state)
                continue
            part, num_passed = queues.met(state.replica_id, query.tenant, total - held, query.share, place)
            step_s = queue_s * min(1.0, price.room / max(1, state.queued_tokens))
            part_s = queues.before_s(state.replica_id, part, state.busy_until, now)
            before_s = max(part_s, step_s / 2.0, state.first_at - now)
            found.append(state.letting_by(price, min(queue_s, before_s), num_passed * own_s, now))
        return found
