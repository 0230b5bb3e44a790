"""The fewest blocks of work: prompt blocks still to compute there, this one's included, plus blocks in use.

Source: NVIDIA Dynamo, `lib/kv-router` (crawled up to 2026-09), default selector:
    cost = prefill_load_scale * max(0, active prefill + prompt - overlap_score_weight * cached) / block size
         + blocks of running sequences
least wins, ties at random; with `router_temperature` above 0, a draw from the softmax of the costs, negated
and scaled to 0..1, divided by it. Ray 2.60.0's KVAwareRouter asks the same selection service
(`ray_kv_aware`).
Not represented: its own bookkeeping of sequences (what replicas report, plus what they have not seen yet,
stands in for it; blocks that the prompt would share with running sequences are therefore in neither sum);
credits for host memory and disk (0.75, 0.25); busy thresholds and its queue; routers that do not hear of
each other. What is exact here favours it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.options import check_range
from router.policies.ranking import by_cost
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


class DynamoKv(StatelessPolicy):
    name = "dynamo_kv"
    uses_prefix = True
    Options = DynamoKvOptions

    def __init__(self, context: PolicyContext, options: DynamoKvOptions) -> None:
        self._options = options
        self._block_size = context.block_size
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        costs = [self._cost(candidate, request.shape.num_prompt_tokens) for candidate in candidates]
        ranked = by_cost(candidates, costs, self._rng)
        if self._options.router_temperature > 0.0:
            drawn = self._draw(costs)
            chosen = next(scored for scored in ranked if scored.candidate is candidates[drawn])
            ranked.remove(chosen)
            ranked.insert(0, chosen)
        return ranked

    def _cost(self, candidate: Candidate, num_prompt_tokens: int) -> float:
        load, options = candidate.load, self._options
        credit = options.overlap_score_weight * candidate.cached_tokens
        prefill_tokens = max(0.0, load.queued_tokens + num_prompt_tokens - credit)
        used_blocks = load.used_fraction * load.total_blocks
        return options.prefill_load_scale * prefill_tokens / self._block_size + used_blocks

    def _draw(self, costs: Sequence[float]) -> int:
        return softmax_draw(costs, self._options.router_temperature, self._rng)


def softmax_draw(costs: Sequence[float], temperature: float, rng: random.Random) -> int:
    """The index of a cost drawn with weight exp(-scaled cost / temperature), costs scaled to 0..1."""
    least, spread = min(costs), max(costs) - min(costs)
    if not spread:
        return rng.randrange(len(costs))
    weights = [math.exp(-(cost - least) / spread / temperature) for cost in costs]
    return rng.choices(range(len(costs)), weights)[0]
