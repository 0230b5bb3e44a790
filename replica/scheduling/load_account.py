"""The work of an engine, as routers are told of it: tokens to compute, their attention, context. Sums alone.

Knows requests; knows neither blocks nor who is next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache.priority import MAX_PRIORITY
from replica.scheduling.request import Request


def context_tokens(running: Iterable[Request]) -> int:
    """Tokens whose K/V the running requests hold."""
    return sum([request.num_computed for request in running])


def queued_uncached_tokens(running: Iterable[Request], waiting: Iterable[Request]) -> int:
    """Tokens to compute before each of these has its next token, decodes' own not counted.

    For requests that wait it rests on what the cache held, or was going to, when they came.
    """
    begun = sum([request.num_uncomputed for request in running if not request.is_decoding])
    return begun + sum([len(request.token_ids) - request.expected_hit for request in waiting])


@dataclass(slots=True)
class Queued:
    """A tenant's part of what is queued."""

    share: float
    tokens: int = 0


def queued_by_tenant(
    running: Iterable[Request], waiting: Iterable[Request], *, tenant: str = "", priority: int = MAX_PRIORITY
) -> dict[str, Queued]:
    """`queued_uncached_tokens`, by whose they are; of `tenant` only what goes before such a priority."""
    queued: dict[str, Queued] = {}
    for request in running:
        if not request.is_decoding:
            of = queued.setdefault(request.tenant, Queued(request.share))
            of.tokens += request.num_uncomputed
    for request in waiting:
        if request.tenant != tenant or request.priority <= priority:
            of = queued.setdefault(request.tenant, Queued(request.share))
            of.tokens += len(request.token_ids) - request.expected_hit
    return queued


def queued_attention(running: Iterable[Request], waiting: Iterable[Request]) -> int:
    """(query, key) pairs of `queued_uncached_tokens`: each token attends all before it in its prompt."""
    pairs = sum([_pairs(r.num_computed, len(r.token_ids)) for r in running if not r.is_decoding])
    return pairs + sum([_pairs(r.expected_hit, len(r.token_ids)) for r in waiting])


def _pairs(start: int, end: int) -> int:
    """(query, key) pairs of the tokens in [start, end), under a causal mask."""
    return (end - start) * (end + start) // 2
