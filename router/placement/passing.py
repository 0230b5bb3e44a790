"""What a request meets at engines that let shorter prompts by: what goes before it there, and what it passes.

Sent at once, a request waits in an engine's queue, and those compute the shortest prompt first, however many
tokens of others wait (`cache/scheduling_order.py`). So a queue does not cost it all of its seconds: each
prompt there makes it wait, or waits for it.

    backlog  = what goes before it, half a step in progress at least
    passed_s = own prefill seconds * prompts that it passes

Where prompts are held back (late binding) the order is the Router's, engines' queues are short, and decisions
count all of them (docs/design/019-scheduling-order.md).

Knows states and who waits where; books nothing. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.events import StepTimeModel
from router.placement.decision import RouteQuery
from router.placement.sent_prompts import SentPrompts
from router.pricing.cost import prefill_s
from router.pricing.replica_load import ReplicaState


class Passing:
    def __init__(self, sent: SentPrompts) -> None:
        """sent: told of all that this Router sends."""
        self._sent = sent

    def met_by(
        self, query: RouteQuery, states: Sequence[ReplicaState], cached: Sequence[int], now: float
    ) -> list[ReplicaState]:
        """The states as that request finds them. cached: usable tokens of its prompt that each holds.

        O(replicas, and prompts there that go before it).
        """
        found = []
        total, sent = query.num_prompt_tokens, self._sent
        alike: tuple[StepTimeModel, int, int] | None = None  # mostly all are of one speed and hold the same
        own_s = 0.0
        for state, held in zip(states, cached, strict=True):
            price, queue_s = state.price, state.busy_until - now
            # Without a place there it would wait for one, which nobody gives up.
            is_passed = queue_s > 0.0 and state.num_requests < state.info.max_running
            if price is None or not is_passed or not sent.lets_by(state.replica_id):
                found.append(state)
                continue
            if (price.step_time, price.room, held) != alike:
                alike = price.step_time, price.room, held
                own_s = prefill_s(price, total, held)
            place = sent.place(state.replica_id, query, own_s, now)
            part = sent.before(state.replica_id, query.tenant, total - held, query.share, _alike, place)
            step_s = queue_s * min(1.0, price.room / max(1, state.queued_tokens))
            before_s = max(part * queue_s, step_s / 2.0, state.late_until - now)
            num_passed = sent.num_passed(state.replica_id, query.tenant, place, state.num_waiting)
            found.append(state.letting_by(min(queue_s, before_s), num_passed * own_s, now))
        return found


def _alike(tenant: str) -> float:
    """What tenants have had is known to the engines: here nobody has had more than another."""
    return 0.0
