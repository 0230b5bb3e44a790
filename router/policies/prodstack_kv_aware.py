"""Whoever caches all of the prompt but 2,000 tokens; else by session, else by rate.

Source: vLLM production-stack a6c01db0 (2026-08-05), `--routing-logic kvaware`: the LMCache controller is
asked who holds the tokens; the instance it names is taken if matched >= prompt - kv_aware_threshold
(2,000 tokens), so that every prompt shorter than that goes to the named one. Otherwise the session's place
on the hash ring, and without a session the lowest rate of the last 60 s. No load.
Not represented: the controller's delay, and that it names whoever was first to hold the prompt's first 256
tokens, with as much of the prompt as that one was first to hold. Here the answer is this router's own exact
index, the longest match of it; both favour it. Where all prompts begin alike, either way those shorter than
2,000 tokens and that beginning all go to one replica: a quarter of the Mooncake conversation trace. Nobody
holding anything is "no match", as there. Without `--session-key` (its default) it has no sessions and goes
by rate; here it has those that clients name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored
from router.policies.options import check_range
from router.policies.ranking import chosen_first
from router.policies.session_affinity import SessionPlacement
from router.policies.stateful import StatefulPolicy
from router.pricing.cost import Candidate


@dataclass(frozen=True, slots=True)
class ProdstackKvAwareOptions:
    kv_aware_threshold: int = 2000  # tokens that may be missing
    replication: int = 160  # points on the session ring per replica

    def __post_init__(self) -> None:
        check_range(self, kv_aware_threshold=(0, 2**30), replication=(1, 10_000))


class ProdstackKvAware(StatefulPolicy):
    name = "prodstack_kv_aware"
    uses_prefix = True
    Options = ProdstackKvAwareOptions

    def __init__(self, context: PolicyContext, options: ProdstackKvAwareOptions) -> None:
        self._threshold = options.kv_aware_threshold
        self._sessions = SessionPlacement(context, options.replication)

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        otherwise = self._sessions.rank(candidates, request)
        holder = max(candidates, key=lambda candidate: candidate.cached_tokens)
        wanted = request.shape.num_prompt_tokens - self._threshold
        if holder.cached_tokens and holder.cached_tokens >= wanted:
            return chosen_first(holder, [scored.candidate for scored in otherwise])
        return otherwise

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._sessions.add(replica_id)

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._sessions.remove(replica_id)

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self._sessions.record(replica_id)
