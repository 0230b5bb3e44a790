"""A trie of 128-character chunks: anybody who was sent the longest like beginning, drawn at random.

Source: vLLM production-stack a6c01db0 (2026-08-05), `--routing-logic prefixaware`: each chunk hashed
with xxHash64, the path in the trie gives the context; holders of the deepest node reached, one of them at
random. No load anywhere. A match shorter than `prefix_min_match_length` (0, so none is) goes to the lowest
rate of the last 60 s instead; without any match everybody holds the root, so the draw is among all.
Not represented: the last unfinished chunk, which counts there as a whole one. There, nothing is ever
evicted ("assume no eviction"; memory grows until the process dies); here `max_chunks` bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.prefix_store import PrefixStore
from router.policies.indexes.request_rate import RequestRate
from router.policies.options import check_range
from router.policies.prompt_parts import PromptChunks, prompt_chunks
from router.policies.ranking import by_cost, chosen_first
from router.policies.session_affinity import RATE_WINDOW_S
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class ProdstackPrefixOptions:
    chunk_chars: int = 128
    prefix_min_match_length: int = 0  # characters; a shorter match goes by rate
    max_chunks: int = 2_000_000

    def __post_init__(self) -> None:
        check_range(
            self,
            chunk_chars=(1, 1_000_000),
            prefix_min_match_length=(0, 2**30),
            max_chunks=(1, 100_000_000),
        )


class ProdstackPrefix(StatefulPolicy):
    name = "prodstack_prefix"
    uses_prefix = True
    Options = ProdstackPrefixOptions

    def __init__(self, context: PolicyContext, options: ProdstackPrefixOptions) -> None:
        self._options = options
        self._block_size = context.block_size
        self._clock = context.clock
        self._rng = context.rng
        self._store = PrefixStore(options.max_chunks, ttl_s=math.inf)
        self._rate = RequestRate(RATE_WINDOW_S)

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        chunks = self._chunks(request)
        matched = self._store.match(chunks.prefixes, [candidate.replica_id for candidate in candidates])
        longest = max(matched.values(), default=0)
        if longest * chunks.chars_per_chunk < self._options.prefix_min_match_length:
            now = self._clock()
            return by_cost(candidates, [self._rate.num_requests(c.replica_id, now) for c in candidates])
        holders = [c for c in candidates if matched.get(c.replica_id, 0) == longest]
        return chosen_first(self._rng.choice(holders), self._rng.sample(candidates, len(candidates)))

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._store.add(replica_id)
        self._rate.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._store.remove(replica_id)
        self._rate.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        now = self._clock()
        chunks = self._chunks(request)
        self._store.insert(chunks.prefixes, 1, replica_id, now)
        self._rate.record(replica_id, now)

    def _chunks(self, request: PolicyRequest) -> PromptChunks:
        return prompt_chunks(request.hints, self._block_size, self._options.chunk_chars)
