"""The replica that was sent the longest like beginning, unless little is alike or the load is uneven.

Source: SGLang router, `cache_aware` (sgl-model-gateway, 2026): one radix tree of characters, shared by all
workers.
    max - min > 64 requests and max > 1.5 * min  ->  least loaded
    matched / prompt characters > 0.3            ->  who was last sent that prefix
    otherwise                                    ->  least loaded
The prompt enters the tree whichever rule chose; ties go to the first worker, so an idle fleet's cold prompts
all do. Defaults are those that a router starts with (`RouterArgs`, its command line), also of the tree, of
which each worker keeps 2^26 characters. The library's own, as many descriptions have them, are 32, 1.1 and
0.5, and 10,000 characters, which would forget every prompt of a usual length at once.
Not represented: eviction every 30 s (here at once); a worker's circuit breaker. Load is this gateway's own
count of open requests, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.options import check_range
from router.policies.ranking import chosen_first, least_loaded, num_in_flight
from router.policies.sent_text import SentText
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class SglangCacheAwareOptions:
    cache_threshold: float = 0.3  # share of the prompt that must be matched
    balance_abs_threshold: int = 64  # requests between the most and the least loaded
    balance_rel_threshold: float = 1.5  # the most loaded over the least
    max_tree_chars: int = 2**26  # per replica

    def __post_init__(self) -> None:
        check_range(
            self,
            cache_threshold=(0.0, 1.0),
            balance_abs_threshold=(0, 1_000_000),
            balance_rel_threshold=(1.0, 1_000_000.0),
            max_tree_chars=(1, 2**30),
        )


class SglangCacheAware(SentText):
    name = "sglang_cache_aware"
    uses_prefix = True
    Options = SglangCacheAwareOptions

    def __init__(self, context: PolicyContext, options: SglangCacheAwareOptions) -> None:
        super().__init__(context.block_size, options.max_tree_chars)
        self._options = options

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        by_load = least_loaded(candidates, num_in_flight)
        if self._is_imbalanced(by_load):
            return chosen_first(by_load[0], by_load)
        text = self._text(request)
        match = self._tree.match(text.symbols)
        if match.length * text.chars_per_symbol <= self._options.cache_threshold * text.num_chars:
            return chosen_first(by_load[0], by_load)
        holder = match.node.last_owner
        # One that cannot be chosen now is passed over for the first that can, as there.
        chosen = next((c for c in candidates if c.replica_id == holder), candidates[0])
        return chosen_first(chosen, by_load)

    def _is_imbalanced(self, by_load: Sequence[Candidate]) -> bool:
        least, most = num_in_flight(by_load[0]), num_in_flight(by_load[-1])
        return (
            most - least > self._options.balance_abs_threshold
            and most > self._options.balance_rel_threshold * least
        )
