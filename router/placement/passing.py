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

from collections.abc import Sequence
from functools import partial

try:
    import router.native.passing as compiled
except ModuleNotFoundError:  # no C compiler where this was installed: the same, by a loop in Python
    compiled = None  # type: ignore[assignment]

from cache.events import StepTimeModel
from cache.types import HashHint
from router.placement.decision import RouteQuery
from router.placement.replica_queue import ReplicaQueue
from router.placement.replica_queues import ReplicaQueues
from router.pricing.cost import Price, prefill_s
from router.pricing.replica_state import ReplicaState

IS_COMPILED = compiled is not None  # whether replicas are asked in C


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
        if not self._queues.passable:
            return states
        if not IS_COMPILED:
            return self.interpreted(query, hints, states, cached, now)
        return compiled.met_by(
            states,
            cached,
            self._queues.passable,
            hints,
            query.tenant,
            query.share,
            query.num_prompt_tokens,
            self._queues.block_size,
            now,
            partial(_own, query, now),
            partial(self._queues.promised_place, query, hints),
        )

    def interpreted(
        self,
        query: RouteQuery,
        hints: Sequence[HashHint],
        states: list[ReplicaState],
        cached: Sequence[int],
        now: float,
    ) -> list[ReplicaState]:
        """`met_by` without what is compiled. `native/passing.c` does as this does."""
        passable, total = self._queues.passable, query.num_prompt_tokens
        found = []
        # Mostly all are of one speed and hold the same; there is one order in which prompts stand back.
        alike: tuple[StepTimeModel, int, int] | None = None
        own_s = own_place = 0.0
        for state, held in zip(states, cached, strict=True):
            queue, price, queue_s = passable.get(state.replica_id), state.price, state.busy_until - now
            # Without a place there it would wait for one, which nobody gives up.
            if (
                queue is None
                or price is None
                or queue_s <= 0.0
                or state.num_requests >= state.info.max_running
            ):
                found.append(state)
                continue
            num_chunks = -(-(total - held) // price.room)
            if (price.step_time, num_chunks, held) != alike:
                alike = price.step_time, num_chunks, held
                own_s, own_place = _own(query, now, queue, price, held)
            place = own_place
            if queue.sent:
                place = max(place, self._queues.promised_place(query, hints, state.replica_id, held))
            if place >= queue.last_place(query.tenant):
                found.append(state)
                continue
            part, num_passed = queue.met(query.tenant, total - held, query.share, place)
            step_s = queue_s * price.room / max(price.room, state.queued_tokens)
            before_s = max(queue.before_s(part, state.busy_until, now), step_s / 2.0, state.first_at - now)
            found.append(state.letting_by(price, min(queue_s, before_s), num_passed * own_s, now))
        return found


def _own(
    query: RouteQuery, now: float, queue: ReplicaQueue, price: Price, cached: int
) -> tuple[float, float]:
    """Of its prefill where it would find so much cached: seconds, and its place there."""
    own_s = prefill_s(price, query.num_prompt_tokens, cached)
    return own_s, queue.place(query, own_s, now)
