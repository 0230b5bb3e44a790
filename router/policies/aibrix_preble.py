"""A radix tree of tokens: more than half matched goes to its holder used least, the rest where work is least.

Source: AIBrix e3e10f9e (2026-08-22), `prefix-cache-preble`, a port of Preble (`preble`):
    max - min > 8 requests  ->  only the least loaded pods may be chosen (since 2026-06, its #2382)
    matched / prompt > 0.5  ->  holders of the deepest node: the fewest requests of the last 3 minutes
    otherwise               ->  least sum over the pod's nodes of the last 3 minutes of
                                miss rate * requests * prefill time / holders of the node
                                + 45 tokens to decode * 0.15 s
Prefill times are those of Mistral-7B on a V100, whatever the engine: its default of two it can be told.
Not represented: nodes leave its tree by age; here each replica keeps what its cache holds, which bounds
memory. Blocks of the engine stand for tokens. The order of equal costs is the candidates'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.prefix_window import PrefixWindow
from router.policies.indexes.prompt_tree import PromptTree
from router.policies.indexes.radix_tree import nearest_owners
from router.policies.options import check_range
from router.policies.profiled_prefill import V100_MISTRAL_7B
from router.policies.ranking import by_cost, chosen_first, least_loaded_if_uneven, num_requests
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate

DECODE_TOKEN_S = 0.15


@dataclass(frozen=True, slots=True)
class AibrixPrebleOptions:
    match_threshold: float = 0.5  # share of the prompt
    window_s: float = 180.0
    decode_tokens: int = 45  # expected of every request
    imbalance_abs_count: int = 8  # requests between the most and the least loaded

    def __post_init__(self) -> None:
        check_range(
            self,
            match_threshold=(0.0, 1.0),
            window_s=(1.0, 1e6),
            decode_tokens=(0, 1_000_000),
            imbalance_abs_count=(0, 1_000_000),
        )


class AibrixPreble(StatefulPolicy):
    name = "aibrix_preble"
    uses_prefix = True
    Options = AibrixPrebleOptions

    def __init__(self, context: PolicyContext, options: AibrixPrebleOptions) -> None:
        self._options = options
        self._block_size = context.block_size
        self._clock = context.clock
        self._window = PrefixWindow(window_s=options.window_s, prefill_s=V100_MISTRAL_7B.seconds)
        self._prompts = PromptTree(self._window, context.block_size)

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        self._window.expire(self._clock())
        allowed = least_loaded_if_uneven(candidates, num_requests, self._options.imbalance_abs_count)
        names = {candidate.replica_id for candidate in allowed}
        by_work = by_cost(candidates, [self._work_s(candidate.replica_id) for candidate in candidates])
        by_work.sort(key=lambda scored: scored.replica_id not in names)
        match = self._window.match(tuple(request.hints))
        matched_tokens = match.length * self._block_size
        if matched_tokens <= self._options.match_threshold * request.shape.num_prompt_tokens:
            return by_work
        owners = nearest_owners(match.node, names)
        if not owners:
            return by_work
        holders = [candidate for candidate in allowed if candidate.replica_id in owners]
        chosen = min(holders, key=lambda candidate: self._window.owner_use(candidate.replica_id).num_requests)
        return chosen_first(chosen, [scored.candidate for scored in by_work])

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._window.add_owner(replica_id, info.num_blocks * self._block_size)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._window.remove_owner(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        leaf = self._prompts.send(request, replica_id)
        self._window.count(leaf, leaf.end_chars, leaf.chars_before, self._clock())

    def _work_s(self, replica_id: ReplicaId) -> float:
        use = self._window.owner_use(replica_id)
        return use.work_s + use.num_nodes * self._options.decode_tokens * DECODE_TOKEN_S
