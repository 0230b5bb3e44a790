"""A weighted sum of three scores: the shortest queue, the emptiest cache, the longest like beginning.

Source: Gateway API Inference Extension 84436a96 (2026-08-18) with the endpoint picker that moved to
llm-d-router, default profile, approximate prefix plugin: per pod an LRU of chained block hashes of the
engine's own size imitates its cache; a prompt counts up to 256 blocks of 16 tokens and is recorded after
the decision. Scores are 0 to 1, most wins, ties at random:
    2 * (longest queue - queue) / (longest - shortest)    1 if all are equal
    2 * (1 - used fraction of the cache)
    3 * blocks matched / blocks looked at                 they need not be contiguous
Not represented: metrics up to 200 ms old, which favours it; blocks of the messages' JSON (here the engine's
own, so roles and templates take part alike). Its sum is shown here as a cost, so with its sign changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.replica_lru import ReplicaLru
from router.policies.options import check_range
from router.policies.ranking import by_cost
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate

MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class GieEppOptions:
    queue_weight: float = 2.0
    kv_cache_weight: float = 2.0
    prefix_weight: float = 3.0
    block_size_tokens: int = 16  # of the blocks that `max_prefix_blocks` counts
    max_prefix_blocks: int = 256  # of a prompt; the rest is neither matched nor recorded

    def __post_init__(self) -> None:
        weights = (0.0, MAX_WEIGHT)
        check_range(
            self,
            queue_weight=weights,
            kv_cache_weight=weights,
            prefix_weight=weights,
            block_size_tokens=(1, 1_000_000),
            max_prefix_blocks=(1, 100_000_000),
        )


class GieEpp(StatefulPolicy):
    name = "gie_epp"
    uses_prefix = True
    Options = GieEppOptions

    def __init__(self, context: PolicyContext, options: GieEppOptions) -> None:
        self._options = options
        self._rng = context.rng
        max_tokens = options.max_prefix_blocks * options.block_size_tokens
        self._max_blocks = max(1, max_tokens // context.block_size)  # of ours
        self._index = ReplicaLru()

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        prefixes = self._prefixes(request)
        held = self._index.count(prefixes)
        total = len(prefixes) or 1
        matched = [held.get(candidate.replica_id, 0) / total for candidate in candidates]
        options = self._options
        scores = weighted_scores(
            candidates,
            matched,
            queue_weight=options.queue_weight,
            kv_cache_weight=options.kv_cache_weight,
            prefix_weight=options.prefix_weight,
        )
        return by_cost(candidates, [-score for score in scores], self._rng)

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._index.add(replica_id, info.num_blocks)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._index.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self._index.insert(self._prefixes(request), replica_id)

    def _prefixes(self, request: PolicyRequest) -> Sequence[HashHint]:
        return request.hints[: self._max_blocks]


def weighted_scores(
    candidates: Sequence[Candidate],
    matched: Sequence[float],
    *,
    queue_weight: float,
    kv_cache_weight: float,
    prefix_weight: float,
) -> list[float]:
    """The endpoint picker's sum per candidate, most is best. matched: share of the prompt, 0 to 1."""
    queues = [candidate.load.num_waiting for candidate in candidates]
    longest, spread = max(queues), max(queues) - min(queues)
    return [
        queue_weight * ((longest - queue) / spread if spread else 1.0)
        + kv_cache_weight * (1.0 - candidate.load.used_fraction)
        + prefix_weight * share
        for candidate, queue, share in zip(candidates, queues, matched, strict=True)
    ]
