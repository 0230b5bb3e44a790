"""The order a policy put replicas in, kept as it was decided and told in full only when asked for.

A decision among 64 replicas has a fraction of a millisecond: 64 candidates with everything one may want to
know of them are made for whoever explains a decision, not for each one taken.
Knows states, matches and costs; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from cache.types import ReplicaId
from router.policies.base import Scored
from router.pricing.cost import Candidate
from router.pricing.replica_state import ReplicaState


@dataclass(slots=True, eq=False)
class Ranking:
    """Replicas that could be chosen, what each holds of the prompt, and the order. Never empty."""

    states: Sequence[ReplicaState]
    cached: Sequence[int]  # usable tokens of the prompt, per state
    costs: Sequence[float | None]  # per state; None if the policy has none
    order: Sequence[int]  # indices of `states`, best first
    unmatched: Set[ReplicaId]  # whose cache is unknown
    decided_at: float
    _scored: tuple[Scored, ...] | None = field(default=None, init=False)
    _cached_by: dict[ReplicaId, int] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def best(self) -> ReplicaState:
        return self.states[self.order[0]]

    @property
    def best_cached(self) -> int:
        return self.cached[self.order[0]]

    @property
    def is_best_matched(self) -> bool:
        return self.best.replica_id not in self.unmatched

    def cached_by(self, replica_id: ReplicaId) -> int:
        """Usable tokens of the prompt that replica holds; 0 if it is not among these."""
        if self._cached_by is None:
            pairs = zip(self.states, self.cached, strict=True)
            self._cached_by = {state.replica_id: held for state, held in pairs if held}
        return self._cached_by.get(replica_id, 0)

    def replica_ids(self, most: int) -> tuple[ReplicaId, ...]:
        """The first so many, best first."""
        return tuple([self.states[index].replica_id for index in self.order[:most]])

    def scored(self) -> tuple[Scored, ...]:
        """All of it, best first. Made at the first call."""
        if self._scored is None:
            candidates = candidates_of(self.states, self.cached, self.unmatched, self.decided_at)
            self._scored = tuple([Scored(candidates[index], self.costs[index]) for index in self.order])
        return self._scored


def candidates_of(
    states: Sequence[ReplicaState], cached: Sequence[int], unmatched: Set[ReplicaId], now: float
) -> list[Candidate]:
    """The replicas as policies see them."""
    return [
        Candidate(state.replica_id, state.view(now), held, state.replica_id not in unmatched)
        for state, held in zip(states, cached, strict=True)
    ]


def ranking_of(
    scored: Sequence[Scored],
    states: Sequence[ReplicaState],
    cached: Sequence[int],
    unmatched: Set[ReplicaId],
    now: float,
) -> Ranking:
    """What a policy made of the candidates of these states."""
    index_by_id = {state.replica_id: index for index, state in enumerate(states)}
    order = [index_by_id[one.replica_id] for one in scored]
    costs: list[float | None] = [None] * len(states)
    for index, one in zip(order, scored, strict=True):
        costs[index] = one.cost
    ranking = Ranking(states, cached, costs, order, unmatched, now)
    ranking._scored = tuple(scored)
    return ranking
