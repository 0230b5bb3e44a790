"""What it costs that blocks of a prompt lie in host memory: seconds of copying before the first token.

A replica copies them back where that is faster than computing them, and says how long a block takes: either
they count as cached and their copying as work before the request, or they do not count.
Knows tokens and seconds; knows neither hashes nor policies. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cache.types import ReplicaId
from router.pricing.cost import prefill_s
from router.pricing.replica_state import ReplicaState


class WithCopies(NamedTuple):
    """What replicas count as for one request."""

    cached: list[int]  # tokens of it that need not be computed
    copy_s: dict[ReplicaId, float]  # of copying, which is work before it; none where nothing is copied


def with_copies(
    states: Sequence[ReplicaState],
    cached: Sequence[int],
    pools: Mapping[ReplicaId, int],
    *,
    block_size: int,
) -> WithCopies:
    """The cached tokens as they count for a request that these hold so much of, and what they cost first.

    cached: usable tokens of it that each holds, wherever. pools: of replicas with host memory, leading blocks
    that need no copying. O(states).
    """
    counted = WithCopies([], {})
    for state, tokens in zip(states, cached, strict=True):
        in_pool = pools[state.replica_id] * block_size if state.replica_id in pools else tokens
        copy_s = _copy_s(state, tokens, in_pool, block_size)
        if copy_s:
            counted.copy_s[state.replica_id] = copy_s
        counted.cached.append(tokens if copy_s is not None else in_pool)
    return counted


def _copy_s(state: ReplicaState, cached: int, in_pool: int, block_size: int) -> float | None:
    """Seconds that it copies blocks back for the request; None: it computes them instead."""
    copy_block_s, price = state.load.copy_block_s, state.price
    # Who has not measured copies, or steps, copies whatever it finds.
    if cached <= in_pool or copy_block_s is None or price is None:
        return 0.0
    copy_s = (cached - in_pool) / block_size * copy_block_s
    return copy_s if copy_s < prefill_s(price, cached, in_pool) else None
