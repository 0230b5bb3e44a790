"""Send each request where it costs the fleet the least time: the default policy.

Argmin of `router.pricing.cost`; near-ties go to the less loaded of two drawn at random, so that several
routers with the same view do not all pick the same replica. Where there are several routers, each prefers
its own share of the replicas for what has to be computed: what one has just sent is unknown to the others for
a moment, and cold prompts are those that all of them would send to the same idle replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.policies.base import PolicyContext, PolicyRequest, Scored, StatelessPolicy
from router.policies.options import check_range
from router.pricing.cost import (
    MEMORY_PRESSURE_S,
    Candidate,
    Price,
    RecomputeCharge,
    costs,
    expected_times,
    prefill_s,
    price_of,
    tuning_free,
)
from router.pricing.replica_state import ReplicaState

TieKey = tuple[int, float, int]

# Of the prefill of what prompts share: how much dearer everybody but its heir is. An heir may have several to
# compute at once, and a request waits for some of those rather than making another copy.
HEIR_SHARE = 12.0


@dataclass(frozen=True, slots=True)
class ExpectedTimeOptions:
    near_tie: float = 0.001  # costs within this share of the best are as good: less loaded of two drawn
    recompute_idle: float = 2.0  # w where nobody is queued and no replica is free
    recompute_per_queued: float = 1.0  # more of it per q * (1 + taken + q), q queued per replica
    recompute_most: float = 100.0  # reached with nine queued: overload lasts, but not for ever
    hot_uses: float = 4.0  # uses in a minute or two that a prefix's next copy must have to be worth making
    hot_uses_per_queued: float = 2.0  # more of them per queued request and replica: copies cost time
    memory_pressure_s: float = MEMORY_PRESSURE_S  # costs as much at half full as so much waiting
    # How much counts of computing what new blocks push out, where that is asked for again.
    eviction_regret: float = 1.0
    # How much counts of what others on the same machine wait for: steps that nobody shares.
    crowding: float = 1.0
    own_share: float = 0.1  # of a request's own prefill: how much dearer other routers' replicas are
    # A hot prefix's next copy is computed beside requests, and not by one that could have been sooner.
    copies_beside: bool = True

    def __post_init__(self) -> None:
        check_range(
            self,
            near_tie=(0.0, 1.0),
            recompute_idle=(1.0, 100.0),
            recompute_per_queued=(0.0, 100.0),
            recompute_most=(1.0, 1000.0),
            hot_uses=(1.0, 1e6),
            hot_uses_per_queued=(0.0, 1e6),
            memory_pressure_s=(0.0, 60.0),
            eviction_regret=(0.0, 10.0),
            crowding=(0.0, 10.0),
            own_share=(0.0, 10.0),
        )


class ExpectedTime(StatelessPolicy):
    name = "expected_time"
    uses_prefix = True
    Options = ExpectedTimeOptions

    def __init__(self, context: PolicyContext, options: ExpectedTimeOptions) -> None:
        self.options = options
        self.charge = RecomputeCharge(
            options.recompute_idle, options.recompute_per_queued, options.recompute_most
        )
        self._near_tie = options.near_tie
        self._random = context.rng.random
        self._peers = context.peers
        self._share_of: tuple[int, int] = (0, 1)
        self._replicas: list[ReplicaId] = []
        self._others: frozenset[ReplicaId] = frozenset()  # replicas in the share of other routers

    def uses_of_a_copy(self, mean_queued: float) -> float:
        """How often a copy must be used, in a minute or two, to be an investment."""
        return self.options.hot_uses + self.options.hot_uses_per_queued * mean_queued

    # --- deciding -----------------------------------------------------------------------------

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        shape = request.shape
        cached = [candidate.cached_tokens for candidate in candidates]
        found = costs(candidates, shape, memory_pressure_s=self.options.memory_pressure_s)
        if request.heir is not None or self._preferred_by_others():
            names = [candidate.replica_id for candidate in candidates]
            prices = [price_of(candidate.load) for candidate in candidates]
            self._make_dearer(found, names, prices, cached, request)
        order = self._order(found, cached, lambda index: _load_of_view(candidates[index]))
        return [Scored(candidates[index], found[index]) for index in order]

    def order(
        self, states: Sequence[ReplicaState], cached: Sequence[int], request: PolicyRequest, now: float
    ) -> tuple[list[int], list[float]]:
        """`rank` for states as they are: indices, best first, and the cost of each state."""
        found = self.costs(states, cached, request, now)
        return self._order(found, cached, lambda index: _load_of_state(states[index], now)), found

    def is_beaten(
        self, states: Sequence[ReplicaState], cached: Sequence[int], request: PolicyRequest, now: float
    ) -> bool:
        """Whether any of the others may be chosen before the first of these states."""
        first, *others = self.costs(states, cached, request, now)
        return min(others, default=math.inf) <= first * (1.0 + self._near_tie)

    def costs(
        self, states: Sequence[ReplicaState], cached: Sequence[int], request: PolicyRequest, now: float
    ) -> list[float]:
        """Of each state, all in one unit: seconds, or tokens times requests if one's speed is unknown."""
        prices = [state.price for state in states]
        if not _all_known(prices):
            total = request.shape.num_prompt_tokens
            return [
                tuning_free(total - held, state.num_requests_at(now))
                for state, held in zip(states, cached, strict=True)
            ]
        found = expected_times(prices, cached, request.shape, now, self.options.memory_pressure_s)
        if request.heir is not None or self._preferred_by_others():
            self._make_dearer(found, [state.replica_id for state in states], prices, cached, request)
        return found

    def _order(
        self, found: Sequence[float], cached: Sequence[int], load_of: Callable[[int], TieKey]
    ) -> list[int]:
        order = sorted(range(len(found)), key=found.__getitem__)
        best = self._draw(self._near_ties(order, found, cached), load_of)
        if best != order[0]:
            order.remove(best)
            order.insert(0, best)
        return order

    def _near_ties(
        self, order: Sequence[int], found: Sequence[float], cached: Sequence[int]
    ) -> Sequence[int]:
        """Those as good as the first. Holding less of the prompt is never as good: the draw must not
        trade a prefix hit for nothing."""
        first = order[0]
        limit, held = found[first] * (1.0 + self._near_tie), cached[first]
        ties = []
        for index in order:
            if found[index] > limit:
                break
            if cached[index] >= held:
                ties.append(index)
        return ties

    def _draw(self, ties: Sequence[int], load_of: Callable[[int], TieKey]) -> int:
        if len(ties) > 2:
            first = int(self._random() * len(ties))
            second = int(self._random() * (len(ties) - 1))
            ties = (ties[first], ties[second + (second >= first)])
        return min(ties, key=load_of)

    # --- shares of several routers ------------------------------------------------------------

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._replicas.append(replica_id)
        self._share_out()

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._replicas.remove(replica_id)
        self._share_out()

    def _make_dearer(
        self,
        found: list[float],
        names: Sequence[ReplicaId],
        prices: Sequence[Price | None],
        cached: Sequence[int],
        request: PolicyRequest,
    ) -> None:
        """Adds to the costs of replicas that are less wanted for this prompt, or by this router, a share of
        what there is to compute there. An heir is not charged what others there wait for the prompt."""
        heir = request.heir
        if heir is not None:
            less_wanted, share, num_tokens = frozenset(names) - {heir.replica_id}, HEIR_SHARE, heir.tokens
        else:
            less_wanted, share = self._preferred_by_others(), self.options.own_share
            num_tokens = request.shape.num_prompt_tokens
        for index, (name, price) in enumerate(zip(names, prices, strict=True)):
            if price is None:
                continue
            if name in less_wanted:
                found[index] += share * prefill_s(price, num_tokens, cached[index])
            elif heir is not None:  # it is to be computed there: they wait for it in any case
                found[index] -= price.passed_s

    def _preferred_by_others(self) -> frozenset[ReplicaId]:
        place = self._peers()
        if place != self._share_of:
            self._share_of = place
            self._share_out()
        return self._others

    def _share_out(self) -> None:
        """Replicas, and routers where they are more, take turns in order of their names: every router finds
        the same shares without asking, and they are of one size."""
        place, num_routers = self._share_of
        num_shares = min(num_routers, len(self._replicas))
        self._others = frozenset(
            replica_id
            for index, replica_id in enumerate(sorted(self._replicas))
            if num_shares > 1 and index % num_shares != place % num_shares
        )


def _all_known(prices: list[Price | None]) -> TypeGuard[list[Price]]:
    return all(prices)  # a price is a tuple, and never empty


def _load_of_view(candidate: Candidate) -> TieKey:
    """Fewer requests, then less work, then longest not chosen: idle replicas take turns."""
    load = candidate.load
    return load.num_requests, load.backlog_s, load.last_chosen


def _load_of_state(state: ReplicaState, now: float) -> TieKey:
    return state.num_requests_at(now), state.backlog_s(now), state.last_chosen
