"""The engine's queue, as routers are told of it: whose prompts wait, and in which order they are computed.

A Router that knows only what it has sent itself has to guess what other Routers' prompts there are like.
Knows places and tokens; knows neither blocks nor who runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from cache.events import MAX_QUEUED_TOLD, QueuedPrompts
from cache.scheduling_order import SchedulingOrder
from replica.scheduling.request import Request


class QueuedPrompt(NamedTuple):
    """One prompt that waits, or has begun."""

    tenant: str
    share: float
    place: float  # as `SchedulingOrder.place` and its lag have it
    tokens: int  # to compute


def prompts_of(running: Iterable[Request], waiting: Iterable[Request]) -> list[QueuedPrompt]:
    """Those of the prompts that are not computed yet."""
    begun = [_prompt(r, r.num_uncomputed) for r in running if not r.is_decoding]
    return begun + [_prompt(r, len(r.token_ids) - r.expected_hit) for r in waiting]


def told_queue(
    prompts: Iterable[QueuedPrompt],
    order: SchedulingOrder,
    now_s: float,
    *,
    told: Sequence[QueuedPrompts] = (),
    told_s: float = 0.0,
) -> tuple[QueuedPrompts, ...]:
    """As a `Load` has it that is made now. told: what was said before, at that time, is there as well.

    O(prompts), and sorting each tenant's.
    """
    queues: dict[str, list[QueuedPrompt]] = {}
    told_at = _origin(order, told_s)
    for of in told:
        pairs = zip(of.places, of.tokens, strict=True)
        queues[of.tenant] = [QueuedPrompt(of.tenant, of.share, told_at + at, n) for at, n in pairs]
    for prompt in prompts:
        queues.setdefault(prompt.tenant, []).append(prompt)
    most = MAX_QUEUED_TOLD // max(1, min(len(queues), MAX_QUEUED_TOLD)) if order.preempts else 0
    more = {of.tenant: of for of in told}
    now_at = _origin(order, now_s)
    return tuple(
        [
            _columns(tenant, queue, most, now_at, more.get(tenant))
            for tenant, queue in islice(queues.items(), MAX_QUEUED_TOLD)
        ]
    )


def _columns(
    tenant: str, queue: list[QueuedPrompt], most: int, now_at: float, more: QueuedPrompts | None
) -> QueuedPrompts:
    """The first so many, and the sums of the rest. more: has some that are behind all of these."""
    queue.sort(key=attrgetter("place"))
    first, rest = queue[:most], queue[most:]
    num_more, more_tokens = (more.num_more, more.more_tokens) if more is not None else (0, 0)
    return QueuedPrompts(
        tenant,
        more.share if more is not None else queue[0].share,
        tuple([prompt.place - now_at for prompt in first]),
        tuple([prompt.tokens for prompt in first]),
        num_more + len(rest),
        more_tokens + sum([prompt.tokens for prompt in rest]),
    )


def _prompt(request: Request, num_tokens: int) -> QueuedPrompt:
    return QueuedPrompt(request.tenant, request.share, request.place[0], num_tokens)


def _origin(order: SchedulingOrder, now_s: float) -> float:
    """The place of a prompt of no length that comes then."""
    return order.place(0.0, came_s=now_s, now_s=now_s)
