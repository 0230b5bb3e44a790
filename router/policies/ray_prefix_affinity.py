"""All who were sent the longest like beginning, the shortest queue of them; whoever was sent least if none.

Source: Ray 2.60.0, `PrefixCacheAffinityRouter` (ray.llm): one tree of characters in an actor.
    longest - shortest queue > imbalanced_threshold  ->  power of two choices
    matched / prompt characters < 0.1                ->  who has least text in the tree
    otherwise                                        ->  who owns the deepest matching node
and of several, the shortest queue. `imbalanced_threshold` is infinite by default (10 before, and in its
documentation), which switches balancing off. Eviction is off by default, from 400,000 to 360,000 characters
where it is on; `max_tree_chars`, which Ray lacks, only keeps the memory bounded.
Not represented: queue lengths up to 10 s old, and two or three blocking calls to the actor per request;
both favour it. "Least text" here considers candidates only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.options import check_range
from router.policies.ranking import least_loaded, num_requests, two_random_choices
from router.policies.sent_text import SentText
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class RayPrefixAffinityOptions:
    imbalanced_threshold: float = math.inf  # requests between the longest and the shortest queue
    match_rate_threshold: float = 0.1  # share of the prompt that must be matched
    do_eviction: bool = False
    eviction_threshold_chars: int = 400_000  # per replica: more than this is cut
    eviction_target_chars: int = 360_000  # to this
    max_tree_chars: int = 2**26  # per replica, whether or not eviction is on

    def __post_init__(self) -> None:
        check_range(
            self,
            imbalanced_threshold=(0.0, math.inf),
            match_rate_threshold=(0.0, 1.0),
            eviction_threshold_chars=(0, 2**30),
            eviction_target_chars=(0, self.eviction_threshold_chars),
            max_tree_chars=(1, 2**30),
        )


class RayPrefixAffinity(SentText):
    name = "ray_prefix_affinity"
    uses_prefix = True
    Options = RayPrefixAffinityOptions

    def __init__(self, context: PolicyContext, options: RayPrefixAffinityOptions) -> None:
        super().__init__(context.block_size, options.max_tree_chars)
        self._options = options
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        queues = [num_requests(candidate) for candidate in candidates]
        if max(queues) - min(queues) > self._options.imbalanced_threshold:
            return two_random_choices(candidates, self._rng)
        preferred = self._preferred(candidates, request)
        by_queue = least_loaded(candidates, num_requests, self._rng)
        by_queue.sort(key=lambda candidate: candidate.replica_id not in preferred)
        return [Scored(candidate, None) for candidate in by_queue]

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        super().routed(replica_id, request)
        options = self._options
        if options.do_eviction and self._tree.num_chars(replica_id) > options.eviction_threshold_chars:
            self._tree.trim(replica_id, options.eviction_target_chars)

    def _preferred(self, candidates: Sequence[Candidate], request: PolicyRequest) -> set[ReplicaId]:
        """Those with the longest match, or with least text if that is too short."""
        names = {candidate.replica_id for candidate in candidates}
        text = self._text(request)
        match = self._tree.match(text.symbols, among=names)
        matched_chars = match.length * text.chars_per_symbol
        if match.length and matched_chars >= self._options.match_rate_threshold * text.num_chars:
            return names.intersection(match.node.owners)
        sizes = {name: self._tree.num_chars(name) for name in names}
        smallest = min(sizes.values())
        return {name for name in names if sizes[name] == smallest}
