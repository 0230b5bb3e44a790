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
from replica.scheduling.turns import Turns


class QueuedPrompt(NamedTuple):
    """One prompt that waits, or has begun."""

    tenant: str
    share: float
    place: float  # as `SchedulingOrder.place` and its lag have it
    tokens: int  # to compute


def queued_here(
    running: Iterable[Request],
    turns: Turns,
    order: SchedulingOrder,
    now_s: float,
) -> tuple[QueuedPrompts, ...]:
    """Of an engine where these run and others wait, as it tells of them now. O(requests), and sorting as many
    as are told of."""
    begun = [
        QueuedPrompt(r.tenant, r.share, r.place[0], r.num_uncomputed) for r in running if not r.is_decoding
    ]
    waiting = dict(turns.waiting.queues())
    told = [_first_of(waiting[tenant], turns.ahead(tenant)) for tenant in waiting]
    others = {prompt.tenant: prompt for prompt in begun if prompt.tenant not in waiting}
    told += [QueuedPrompts(name, of.share, turns.ahead(name)) for name, of in others.items()]
    return told_queue(begun, order, now_s, told=told, told_at=0.0)


def told_queue(
    prompts: Iterable[QueuedPrompt],
    order: SchedulingOrder,
    now_s: float,
    *,
    told: Sequence[QueuedPrompts],
    told_at: float,
) -> tuple[QueuedPrompts, ...]:
    """As a `Load` has it that is made now, of these and of what is told. told_at: what is to be added to
    the places in that.

    O(prompts), and sorting each tenant's.
    """
    queues: dict[str, list[QueuedPrompt]] = {}
    for of in told:
        pairs = zip(of.places, of.tokens, strict=True)
        queues[of.tenant] = [QueuedPrompt(of.tenant, of.share, told_at + at, n) for at, n in pairs]
    for prompt in prompts:
        queues.setdefault(prompt.tenant, []).append(prompt)
    most = MAX_QUEUED_TOLD // max(1, min(len(queues), MAX_QUEUED_TOLD)) if order.preempts else 0
    more = {of.tenant: of for of in told}
    now_at = origin(order, now_s)
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
        more.had if more is not None else 0.0,
        tuple([prompt.place - now_at for prompt in first]),
        tuple([prompt.tokens for prompt in first]),
        num_more + len(rest),
        more_tokens + sum([prompt.tokens for prompt in rest]),
    )


def _first_of(waiting: Sequence[Request], had: float) -> QueuedPrompts:
    """As many of a tenant's as may be told of, with their places as they are."""
    tokens = [len(r.token_ids) - r.expected_hit for r in waiting]
    places = tuple([r.place[0] for r in waiting[:MAX_QUEUED_TOLD]])
    first, rest = tokens[:MAX_QUEUED_TOLD], tokens[MAX_QUEUED_TOLD:]
    tenant, share = waiting[0].tenant, waiting[0].share
    return QueuedPrompts(tenant, share, had, places, tuple(first), len(rest), sum(rest))


def origin(order: SchedulingOrder, now_s: float) -> float:
    """The place of a prompt of no length that comes then."""
    return order.place(0.0, came_s=now_s, now_s=now_s)
