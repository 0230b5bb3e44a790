"""The fewest blocks of work: prompt blocks still to compute there, this one's included, plus blocks in use.

Source: NVIDIA Dynamo, `lib/kv-router` (crawled up to 2026-09), default selector:
    cost = prefill_load_scale * max(0, active prefill + prompt - overlap_score_weight * cached) / block size
         + blocks of the prompts in flight there and of this one, each block once
least wins, ties at random; with `router_temperature` above 0, a draw from the softmax of the costs, negated
and scaled to 0..1, divided by it. Blocks in use are its own bookkeeping, as there: full blocks of every
prompt that this router has sent, from then until the answer ends, so those that wait in the engine's queue
count, and what the prompt shares with one in flight does not count again. Routers do not hear of each
other's, which is its default. Ray 2.60.0's KVAwareRouter asks the same selection service (`ray_kv_aware`).
Not represented: its own count of prompt tokens until their first token (what replicas report as queued, plus
what they have not seen yet, stands in for it, and shrinks while a prompt is computed: this favours it);
blocks that answers fill (off by default); credits for host memory and disk (0.75, 0.25); busy thresholds; its
queue, in which requests wait while all workers have more than so many full steps of prefill (off since 1.4, 4
or 16 before).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.indexes.blocks_in_use import BlocksInUse
from router.policies.options import check_range
from router.policies.ranking import by_cost
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class DynamoKvOptions:
    overlap_score_weight: float = 1.0  # how much of a cached token counts
    prefill_load_scale: float = 1.0  # of prefill against running sequences
    router_temperature: float = 0.0  # 0: always the least

    def __post_init__(self) -> None:
        check_range(
            self,
            overlap_score_weight=(0.0, 1e6),
            prefill_load_scale=(0.0, 1e6),
            router_temperature=(0.0, 1e6),
        )


class DynamoKv(StatefulPolicy):
    name = "dynamo_kv"
    uses_prefix = True
    Options = DynamoKvOptions

    def __init__(self, context: PolicyContext, options: DynamoKvOptions) -> None:
        self._options = options
        self._block_size = context.block_size
        self._rng = context.rng
        self._in_use = BlocksInUse()

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        costs = [self._cost(candidate, request) for candidate in candidates]
        ranked = by_cost(candidates, costs, self._rng)
        if self._options.router_temperature > 0.0:
            drawn = self._draw(costs)
            chosen = next(scored for scored in ranked if scored.candidate is candidates[drawn])
            ranked.remove(chosen)
            ranked.insert(0, chosen)
        return ranked

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._in_use.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._in_use.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self._in_use.begin(request.request_id, replica_id, request.hints)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:
        self._in_use.end(request_id)

    def _cost(self, candidate: Candidate, request: PolicyRequest) -> float:
        options = self._options
        credit = options.overlap_score_weight * candidate.cached_tokens
        prompt_tokens = candidate.load.queued_tokens + request.shape.num_prompt_tokens
        prefill_blocks = max(0.0, prompt_tokens - credit) / self._block_size
        used_blocks = self._in_use.with_prompt(candidate.replica_id, request.hints)
        return options.prefill_load_scale * prefill_blocks + used_blocks

    def _draw(self, costs: Sequence[float]) -> int:
        return softmax_draw(costs, self._options.router_temperature, self._rng)


def softmax_draw(costs: Sequence[float], temperature: float, rng: random.Random) -> int:
    """The index of a cost drawn with weight exp(-scaled cost / temperature), costs scaled to 0..1."""
    least, spread = min(costs), max(costs) - min(costs)
    if not spread:
        return rng.randrange(len(costs))
    weights = [math.exp(-(cost - least) / spread / temperature) for cost in costs]
    return rng.choices(range(len(costs)), weights)[0]
