"""The least expected time to the first token: what is queued there, plus what is left of this prompt.

Source: Mooncake (Qin et al., FAST 2025, arXiv 2407.00079), Algorithm 1, "KVCache-centric scheduling":
    TTFT = T_queue + T_prefill(prompt length, cached prefix length)
least wins. T_prefill there is a model fitted offline, here each engine's own fit of its step time; until all
engines have one, tokens queued plus tokens to compute stand for seconds (equal engines).
Not represented: the branch that fetches a longer prefix from another instance (T_transfer, taken where
that instance's prefix is `kvcache_balancing_threshold` times longer), as engines here do not exchange
blocks, nor rejecting what would miss its target. Decoding has machines of its own there.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.ranking import by_cost
from router.pricing.cost import Candidate


class MooncakeMinTtft(StatelessPolicy):
    name = "mooncake_min_ttft"
    uses_prefix = True

    def __init__(self, context: PolicyContext, options: object) -> None:
        self._rng = context.rng

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        num_tokens = request.shape.num_prompt_tokens
        if all([candidate.load.step_time is not None for candidate in candidates]):
            costs = [_expected_ttft_s(candidate, num_tokens) for candidate in candidates]
        else:
            costs = [
                float(candidate.load.queued_tokens + num_tokens - candidate.cached_tokens)
                for candidate in candidates
            ]
        return by_cost(candidates, costs, self._rng)


def _expected_ttft_s(candidate: Candidate, num_prompt_tokens: int) -> float:
    load, cached = candidate.load, candidate.cached_tokens
    assert load.step_time is not None, "asked for seconds of a replica that has not measured itself"
    uncached = num_prompt_tokens - cached
    return load.backlog_s + load.step_time.prefill_s(uncached, cached, load.max_batched_tokens)
