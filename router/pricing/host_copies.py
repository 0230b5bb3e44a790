"""What it costs that blocks of a prompt lie in host memory: seconds of copying before the first token.

A replica copies them back where that is faster than computing them, and says how long a block takes: either
they count as cached and their copying as work before the request, or they do not count.
Knows tokens and seconds; knows neither hashes nor policies. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache.types import ReplicaId
from router.pricing.cost import prefill_s
from router.pricing.replica_load import ReplicaState


def with_copies(
    states: Sequence[ReplicaState],
    cached: Sequence[int],
    pools: Mapping[ReplicaId, int],
    *,
    block_size: int,
    now: float,
) -> tuple[list[ReplicaState], list[int]]:
    """The states and the cached tokens as they count for a request that these hold so much of.

    cached: usable tokens of it that each holds, wherever. pools: of replicas with host memory, leading blocks
    that need no copying. O(states).
    """
    found = [
        _with_copy(state, tokens, pools[state.replica_id] * block_size, block_size, now)
        if state.replica_id in pools
        else (state, tokens)
        for state, tokens in zip(states, cached, strict=True)
    ]
    return [state for state, _ in found], [tokens for _, tokens in found]


def _with_copy(
    state: ReplicaState, cached: int, in_pool: int, block_size: int, now: float
) -> tuple[ReplicaState, int]:
    copy_block_s, price = state.load.copy_block_s, state.price
    # Who has not measured copies, or steps, copies whatever it finds.
    if cached <= in_pool or copy_block_s is None or price is None:
        return state, cached
    copy_s = (cached - in_pool) / block_size * copy_block_s
    if copy_s < prefill_s(price, cached, in_pool):
        return state.behind(copy_s, now), cached
    return state, in_pool
