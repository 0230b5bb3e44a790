"""A decision as it is kept to be explained: the best of its candidates, in plain values.

A decision refers to every replica's state, and every report of an engine makes another one. A thousand of
them kept whole hold on to tens of thousands of objects, which come and go with every request, and which the
garbage collector walks while nobody is served. What is kept here is nothing to it: no cycle can go through
numbers and names (`gc=False`), and of a plain tuple of them it lets go by itself.

Knows decisions and their costs; decides nothing. Owner: the router's event loop.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cache.types import ReplicaId
from router.placement.decision import DecisionRecord, RouteReason
from router.placement.ranking import Ranking
from router.pricing.cost import CostTerms, Price, RequestShape, cost_terms


class KeptCandidate(msgspec.Struct, frozen=True, gc=False):
    """One replica as the decision saw it."""

    replica_id: ReplicaId
    cached_tokens: int  # of the prompt, usable
    is_matched: bool  # False: its cache was unknown
    num_running: int
    num_waiting: int
    queued_tokens: int
    cost: float | None  # the policy's own, less is better; None if it has none
    price: tuple[Any, ...] | None  # the fields of its `Price`; None while its speed was unknown

    def terms(self, shape: RequestShape, now: float, memory_pressure_s: float) -> CostTerms | None:
        """The default policy's cost of it; None while its speed was unknown."""
        if self.price is None:
            return None
        return cost_terms(Price._make(self.price), self.cached_tokens, shape, now, memory_pressure_s)


class KeptDecision(msgspec.Struct, frozen=True, gc=False):
    """One decision, and the best of its candidates."""

    decided_at: float  # seconds, the clock's
    policy: str
    shape: RequestShape
    excluded: frozenset[ReplicaId]
    reason: RouteReason
    available_tokens: int
    exact_tokens: int
    num_candidates: int
    candidates: tuple[KeptCandidate, ...]  # best first, never empty
    is_in_seconds: bool  # whether costs are the default policy's seconds
    heir: ReplicaId | None  # who was to be the only one to compute what it shares with others
    copied_to: ReplicaId | None  # who was sent the hot prefix alone, beside the request

    @property
    def replica_id(self) -> ReplicaId:
        """The one chosen."""
        return self.candidates[0].replica_id


def kept(record: DecisionRecord, most: int) -> KeptDecision:
    """most: of its candidates, at least 1. O(those)."""
    ranking = record.ranking
    return KeptDecision(
        record.decided_at,
        record.policy,
        record.shape,
        record.excluded,
        record.reason,
        record.available_tokens,
        record.exact_tokens,
        len(ranking),
        tuple([_candidate(ranking, index) for index in ranking.order[:most]]),
        record.is_in_seconds,
        None if record.heir is None else record.heir.replica_id,
        None if record.hot_copy is None else record.hot_copy.replica_id,
    )


def _candidate(ranking: Ranking, index: int) -> KeptCandidate:
    state = ranking.states[index]
    return KeptCandidate(
        state.replica_id,
        ranking.cached[index],
        state.replica_id not in ranking.unmatched,
        state.load.num_running,
        state.num_waiting,
        state.queued_tokens,
        ranking.costs[index],
        None if state.price is None else tuple(state.price),
    )
