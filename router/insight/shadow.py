"""A second policy that decides beside the live one and is only counted.

It sees what the live policy saw (the same candidates, the same history, so also the live policy's booking
and caches) and answers one question: what would it have done here? Its choice changes nothing. Its memory, if
it keeps one, follows where requests really went. How much its choices would cost is what the live decision
weighed, or where that weighed no seconds the default cost model: so the difference says what *that* thinks
of them, not what would have happened.

Bounded: it decides on a share of the decisions, its time is counted, and its first failure ends it.
Knows policies and costs; knows neither load's origin nor the index. Owner: the router's event loop.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver
from router.placement.ranking import Ranking, candidates_of
from router.policies import Policy, PolicyRequest
from router.policies.expected_time import ExpectedTime
from router.pricing.cost import MEMORY_PRESSURE_S, cost_terms

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShadowVerdict:
    """What the shadow would have done with one request."""

    request_id: RequestId
    policy: str
    replica_id: ReplicaId
    cached_tokens: int  # of the prompt, that replica was believed to hold
    agrees: bool
    difference_s: float | None  # cost of its choice minus cost of the live one; None while speeds are unknown


@dataclass(slots=True)
class ShadowTotals:
    """Sums since the start, over decisions with at least two candidates that the shadow took too."""

    policy: str
    agreed: int = 0
    disagreed: int = 0
    extra_s: float = 0.0  # cost of its choices over the live ones, where they were dearer
    saved_s: float = 0.0  # under the live ones, where they were cheaper
    spent_s: float = 0.0  # its own time
    failed: bool = False  # it raised, and decides no more
    priced: int = 0  # of those it disagreed in, whose cost is known


class Shadow(SilentObserver):
    """Asks a policy what it would do. Nothing it does reaches a request."""

    def __init__(
        self,
        policy: Policy,
        *,
        share: float = 1.0,
        rng: random.Random | None = None,
        memory_pressure_s: float = MEMORY_PRESSURE_S,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """policy, rng: its own, so that live draws stay what they are; share: of decisions, 0 to 1.

        memory_pressure_s: the live cost model's.
        """
        self.totals = ShadowTotals(policy.name)
        self._policy = policy
        self._share = share
        self._rng = rng or random.Random()
        self._memory_pressure_s = memory_pressure_s
        self._timer = timer
        self._listeners: list[Callable[[ShadowVerdict], None]] = []

    def listen(self, listener: Callable[[ShadowVerdict], None]) -> None:
        """Call `listener` with every verdict; it must not block."""
        self._listeners.append(listener)

    # --- RoutingObserver ----------------------------------------------------------------------

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._guard(lambda: self._policy.replica_added(replica_id, info))

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._guard(lambda: self._policy.replica_removed(replica_id))

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self._guard(lambda: self._shadow(record, query, hints))

    def moved(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        self._guard(lambda: self._policy.routed(replica_id, request))

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self._guard(lambda: self._policy.finished(request_id, hints))

    # --- one decision -------------------------------------------------------------------------

    def _guard(self, act: Callable[[], None]) -> None:
        """A policy on trial may be broken; requests must not notice."""
        if self.totals.failed:
            return
        started_at = self._timer()
        try:
            act()
        except Exception as error:
            self.totals.failed = True
            # By type alone: the message may quote what a prompt says.
            logger.error(
                "the shadow policy failed and decides no more",
                extra={"policy": self._policy.name, "error_type": type(error).__name__},
            )
        finally:
            self.totals.spent_s += self._timer() - started_at

    def _shadow(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        request = PolicyRequest(query.request_id, record.shape, hints, query.prompt, record.heir)
        if len(record.ranking) > 1 and (self._share >= 1.0 or self._rng.random() < self._share):
            self._judge(record, request)
        self._policy.routed(record.replica_id, request)

    def _judge(self, record: DecisionRecord, request: PolicyRequest) -> None:
        ranking = record.ranking
        pick = self._pick(ranking, request)
        agrees = pick == ranking.order[0]
        difference_s = 0.0 if agrees else self._difference_s(record, pick)
        self._count(agrees, difference_s)
        verdict = ShadowVerdict(
            record.request_id,
            self._policy.name,
            ranking.states[pick].replica_id,
            ranking.cached[pick],
            agrees,
            difference_s,
        )
        for listener in self._listeners:
            listener(verdict)

    def _pick(self, ranking: Ranking, request: PolicyRequest) -> int:
        """Index of the state it would choose."""
        states, cached, now = ranking.states, ranking.cached, ranking.decided_at
        if isinstance(self._policy, ExpectedTime):  # the way live decisions take: no views are made
            order, _ = self._policy.order(states, cached, request, now)
            return order[0]
        best = self._policy.rank(candidates_of(states, cached, ranking.unmatched, now), request)[0]
        return next(i for i, state in enumerate(states) if state.replica_id == best.replica_id)

    def _count(self, agrees: bool, difference_s: float | None) -> None:
        totals = self.totals
        totals.agreed += agrees
        totals.disagreed += not agrees
        if difference_s is not None:
            totals.priced += not agrees
            totals.extra_s += max(0.0, difference_s)
            totals.saved_s += max(0.0, -difference_s)

    def _difference_s(self, record: DecisionRecord, pick: int) -> float | None:
        its_s, live_s = self._cost_s(record, pick), self._cost_s(record, record.ranking.order[0])
        return None if its_s is None or live_s is None else its_s - live_s

    def _cost_s(self, record: DecisionRecord, index: int) -> float | None:
        ranking: Ranking = record.ranking
        if record.is_in_seconds:  # what it went by, with what other Routers and heirs are preferred for
            return ranking.costs[index]
        price = ranking.states[index].price
        if price is None:
            return None
        terms = cost_terms(
            price, ranking.cached[index], record.shape, ranking.decided_at, self._memory_pressure_s
        )
        return terms.total_s
