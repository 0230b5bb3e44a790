"""The longest like beginning whose holder is not far above the mean load; a gate for uneven load before it.

Source: AIBrix e3e10f9e (2026-08-22), `prefix-cache`: hashes of a prompt's chunks, chained, in one LRU of
200,000 chunks kept for 20 minutes, each with the pods that were sent it.
    max - min > 8 requests  ->  only the least loaded pods may match
    by match in whole percent, then fewest requests: the first with requests <= mean + 1 * sigma
    none                    ->  fewest requests, ties at random
sigma is the sample's standard deviation, over n - 1. 128 characters a chunk, as its documentation has it
and recommends (the code's 4 would hold 16 prompts of 12,000 tokens); a deviation factor of 1 and a gate of 8
as in its code (2 and 16 in its documentation).
Not represented: requests are what its gateway has open, here what the replicas and this router know.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.prefix_store import PrefixStore
from router.policies.options import check_range
from router.policies.prompt_parts import PromptChunks, prompt_chunks
from router.policies.ranking import chosen_first, least_loaded, least_loaded_if_uneven, num_requests
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class AibrixPrefixOptions:
    chunk_chars: int = 128
    max_chunks: int = 200_000  # of all replicas together
    ttl_s: float = 1200.0
    imbalance_abs_count: int = 8  # requests between the most and the least loaded
    standard_deviation_factor: float = 1.0

    def __post_init__(self) -> None:
        check_range(
            self,
            chunk_chars=(1, 1_000_000),
            max_chunks=(1, 100_000_000),
            ttl_s=(0.0, 1e9),
            imbalance_abs_count=(0, 1_000_000),
            standard_deviation_factor=(0.0, 1e6),
        )


class AibrixPrefix(StatefulPolicy):
    name = "aibrix_prefix"
    uses_prefix = True
    Options = AibrixPrefixOptions

    def __init__(self, context: PolicyContext, options: AibrixPrefixOptions) -> None:
        self._options = options
        self._block_size = context.block_size
        self._clock = context.clock
        self._rng = context.rng
        self._store = PrefixStore(options.max_chunks, options.ttl_s)

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        by_load = least_loaded(candidates, num_requests, self._rng)
        holder = self._holder(by_load, request)
        return chosen_first(by_load[0] if holder is None else holder, by_load)

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._store.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._store.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        chunks = self._chunks(request)
        size = max(1, chunks.chars_per_chunk // self._options.chunk_chars)  # in chunks of theirs
        self._store.insert(chunks.prefixes, size, replica_id, self._clock())

    def _holder(self, by_load: Sequence[Candidate], request: PolicyRequest) -> Candidate | None:
        """The best match that is not overloaded; None if there is none."""
        prefixes = self._chunks(request).prefixes
        if not prefixes:
            return None
        self._store.expire(self._clock())
        allowed = least_loaded_if_uneven(by_load, num_requests, self._options.imbalance_abs_count)
        matched = self._store.match(prefixes, [candidate.replica_id for candidate in allowed])
        holders = [candidate for candidate in allowed if candidate.replica_id in matched]
        # In whole percent: nearly equal matches are decided by load. `allowed` is in order of load already.
        holders.sort(key=lambda candidate: -(100 * matched[candidate.replica_id] // len(prefixes)))
        loads = [num_requests(candidate) for candidate in by_load]
        sigma = statistics.stdev(loads) if len(loads) > 1 else 0.0
        limit = statistics.fmean(loads) + self._options.standard_deviation_factor * sigma
        return next((candidate for candidate in holders if num_requests(candidate) <= limit), None)

    def _chunks(self, request: PolicyRequest) -> PromptChunks:
        return prompt_chunks(request.hints, self._block_size, self._options.chunk_chars)
