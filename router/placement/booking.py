"""Requests that have been sent somewhere: reserved there, expected there, remembered until they are over.

    book: reserve -> predict      routed: moved to whoever accepted it
    ended: computed no more       release: over here, too, with what its client has read

Knows decisions and who took them; takes none (`weighing.py`). Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.block_hash import hint_view as to_hints
from cache.events import RequestEnded
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.config import RouterConfig
from router.index.prefix_index import PrefixIndex
from router.placement.decision import Decision, DecisionRecord, Placement, RouteReason
from router.placement.fleet import Fleet
from router.placement.late_replicas import LateReplicas
from router.placement.observer import RoutingObserver
from router.placement.policy_set import PolicySet
from router.placement.ranking import Ranking
from router.placement.replica_queues import ReplicaQueues
from router.placement.routing_statistics import RoutingCounts
from router.placement.shaper import Shaper, usable_tokens
from router.policies import Policy, PolicyRequest
from router.pricing.cost import RequestShape
from router.pricing.fleet_load import FleetLoad
from router.pricing.replica_load import Reservation

MAX_RANKS = 8  # replicas named to Serve; when all of them refuse, it asks for the others


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """An engine's word of an attempt that is booked elsewhere: it may have taken it. Serve tells so later,
    where one before it in the ranks has refused."""

    replica_id: ReplicaId
    ended: RequestEnded
    heard_at: float  # seconds, the clock's


@dataclass(slots=True)
class InFlight:
    """What is remembered of a request between `book` and `release`."""

    request: PolicyRequest
    excluded: frozenset[ReplicaId]
    policy: Policy
    is_copy: bool = False  # of a hot prefix: no request, and of no interest to whoever watches those
    attempt: int = 0
    accepted_by: ReplicaId | None = None
    first_token_at: float | None = None  # seconds, the clock's
    ended_at: float | None = None  # by its engine's word: it computes no more, whoever reads still
    early_end: EarlyEnd | None = None  # until it is known who took the attempt


class Bookings:
    """Of one router. What they are made with belongs to `Routing`, and is told of each step."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float],
        *,
        fleet: Fleet,
        loads: FleetLoad,
        index: PrefixIndex,
        policies: PolicySet,
        shaper: Shaper,
        late: LateReplicas,
        queues: ReplicaQueues,
        observers: Sequence[RoutingObserver],
        counts: RoutingCounts,
        peers: Callable[[], tuple[int, int]],
    ) -> None:
        """peers: this router's place among the routers of the same replicas, and their number."""
        self._clock = clock
        self._block_size = config.fingerprint.block_size
        self._fleet = fleet
        self._loads = loads
        self._index = index
        self._policies = policies
        self._shaper = shaper
        self._late = late
        self._queues = queues
        self._observers = observers
        self._counts = counts
        self._peers = peers
        self._in_flight: dict[RequestId, InFlight] = {}

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._in_flight)

    def get(self, request_id: RequestId) -> InFlight | None:
        """None: it is not in flight."""
        return self._in_flight.get(request_id)

    # --- the life of a request ----------------------------------------------------------------

    def book(self, decision: Decision) -> Placement:
        """Act on a decision just taken: reserve, and expect its blocks there."""
        query, hints, policy = decision.query, decision.request.hints, decision.policy
        reason = _reason(policy, decision.ranking, decision.request.shape.most_cached)
        record = self._record(decision, reason)
        self._count(decision.ranking, reason)
        self._reserve(decision, record)
        is_priced = decision.ranking.best.price is not None
        expected_s = decision.start_s + decision.prefill_s if is_priced else None
        self._late.sent(query.request_id, record.replica_id, expected_s, decision.engine_s)
        if query.is_new:  # those of a replica that was lost are not evicted
            self._note_missed(hints, decision.available_tokens)
        self._shaper.routed(hints, query.num_prompt_tokens, record.decided_at)
        policy.routed(record.replica_id, decision.request)
        self._in_flight[query.request_id] = InFlight(
            decision.request, query.excluded, policy, attempt=query.attempt
        )
        for observer in self._observers:
            observer.decided(record, query, hints)
        return self._placement(decision, reason)

    def book_copy(self, decision: Decision) -> Placement:
        """The same for a copy of a hot prefix: work like any other, and no use of the prefix. One that stands
        back for long does not make its replica late."""
        query, policy = decision.query, decision.policy
        self._reserve(decision, self._record(decision, RouteReason.LOAD))
        self._in_flight[query.request_id] = InFlight(
            decision.request, query.excluded, policy, is_copy=True, attempt=query.attempt
        )
        return self._placement(decision, RouteReason.LOAD)

    def routed(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """This replica accepted the request: the booking moves there if it is elsewhere."""
        flight = self._in_flight.get(request_id)
        if flight is None:
            return
        flight.accepted_by = replica_id
        if not flight.is_copy:  # it is not finished: no answer makes its prompt longer
            self._index.served(request_id, replica_id)
        if replica_id not in self._fleet:  # what it waits for there says nothing of those that are
            self._late.ended(request_id)
            self._queues.over(request_id)
            return
        if flight.ended_at is not None:
            return
        self._move(flight, request_id, replica_id)
        early, flight.early_end = flight.early_end, None
        if early is not None and early.replica_id == replica_id:
            self._end(flight, early.ended, early.heard_at)

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        """That replica has computed the first token, with so much of the prompt from its cache."""
        self._index.keep(request_id)
        self._answered(request_id)
        flight = self._in_flight.get(request_id)
        if flight is not None and not flight.is_copy:  # which does not stay
            flight.first_token_at = self._clock()
        for observer in self._watching(flight):
            observer.first_token(request_id, replica_id, cached_tokens)

    def continued(self, request_id: RequestId) -> None:
        """Another replica has gone on with an answer that had its first token before."""
        self._index.keep(request_id)
        self._answered(request_id)

    def ended(self, ended: RequestEnded, replica_id: ReplicaId) -> None:
        """That replica computes the attempt no more: it has no work of it from now on, however long its
        client takes to read, and whether it does."""
        flight = self._in_flight.get(ended.request_id)
        if flight is None or flight.attempt != ended.attempt:  # another router's, over, or an earlier one
            return
        if self._loads.placed(ended.request_id) == replica_id:
            self._end(flight, ended, self._clock())
        else:
            flight.early_end = EarlyEnd(replica_id, ended, self._clock())

    def release(self, request_id: RequestId) -> bool:
        """The attempt is over, however it ended; whether there was one. Idempotent."""
        flight = self._in_flight.pop(request_id, None)
        if flight is None:
            return False
        if flight.first_token_at is not None:
            ended_at = self._clock() if flight.ended_at is None else flight.ended_at
            # What an engine says of an end may overtake the answer.
            self._loads.residence.observe(max(0.0, ended_at - flight.first_token_at))
        self._index.drop(request_id)
        self._leave(request_id)
        return True

    def finish(
        self, request_id: RequestId, *, block_hashes: Sequence[BlockHash] = (), answers: Sequence[int] = ()
    ) -> None:
        """The request is over, after all its attempts, and released; once per request.

        block_hashes: chain of the full blocks of prompt and output, () if unknown. answers: tokens of each.
        """
        hints = to_hints(block_hashes)
        self._index.finish(request_id, hints)
        self._policies.finished(request_id, hints)
        for observer in self._observers:
            observer.finished(request_id, hints, answers)

    # --- small parts ----------------------------------------------------------------------------

    def _watching(self, flight: InFlight | None) -> Sequence[RoutingObserver]:
        return () if flight is not None and flight.is_copy else self._observers

    def _reserve(self, decision: Decision, record: DecisionRecord) -> None:
        """Its time and blocks at the replica, which is expected to hold its blocks from then on."""
        query, request, ranking = decision.query, decision.request, decision.ranking
        now, best_id = ranking.decided_at, record.replica_id
        self._loads.reserve(
            best_id, self._reservation(query.request_id, ranking.best_cached, request.shape, now)
        )
        if ranking.is_best_matched:
            self._index.expect(query.request_id, best_id, request.hints, now)
        else:
            self._index.drop(query.request_id)
        self._queues.decided(record, query, request.hints, decision.prefill_s)

    def _move(self, flight: InFlight, request_id: RequestId, replica_id: ReplicaId) -> None:
        """Its booking, to whoever took it."""
        self._late.moved(request_id, replica_id)
        self._queues.moved(request_id, replica_id, self._clock())
        if self._loads.placed(request_id) == replica_id:
            return
        now = self._clock()
        hints, shape = flight.request.hints, flight.request.shape
        overlap = self._index.match(hints).get(replica_id, 0)
        cached = usable_tokens(overlap, shape.num_prompt_tokens, self._block_size)
        self._loads.move(replica_id, self._reservation(request_id, cached, shape, now))
        flight.policy.routed(replica_id, flight.request)
        self._index.expect(request_id, replica_id, hints, now)
        for observer in self._watching(flight):
            observer.moved(replica_id, flight.request)

    def _end(self, flight: InFlight, ended: RequestEnded, heard_at: float) -> None:
        flight.ended_at = heard_at
        if ended.num_tokens:  # which may all be on their way still
            self._answered(ended.request_id)
        self._leave(ended.request_id)

    def _leave(self, request_id: RequestId) -> None:
        """It is no work of any replica any more."""
        self._late.ended(request_id)
        self._queues.over(request_id)
        self._loads.release(request_id)

    def _answered(self, request_id: RequestId) -> None:
        """It waits no more."""
        self._late.answered(request_id)
        self._queues.over(request_id)

    def _note_missed(self, hints: Sequence[HashHint], available_tokens: int) -> None:
        """Of a prompt's blocks, those that were asked for lately and that nobody holds any more."""
        num_missed = self._shaper.num_missed_blocks(hints, available_tokens)
        if num_missed:
            # Requests come to the routers alike, and evictions are told to all of them.
            self._loads.evictions.missed(num_missed * self._peers()[1])

    def _placement(self, decision: Decision, reason: RouteReason) -> Placement:
        query, ranking = decision.query, decision.ranking
        # Anybody may end up with the request, so all of them must be able to read the hashes.
        shares_hashes = self._fleet.unmatched <= query.excluded
        return Placement(
            query.request_id,
            ranking.replica_ids(MAX_RANKS),
            ranking.best_cached // self._block_size,
            query.block_hashes if shares_hashes else (),
            reason,
            decision.policy.name,
            decision.engine_s,
        )

    def _count(self, ranking: Ranking, reason: RouteReason) -> None:
        self._counts.decisions[reason] += 1
        if ranking.unmatched and any([s.replica_id in ranking.unmatched for s in ranking.states]):
            self._counts.degraded += 1

    def _record(self, decision: Decision, reason: RouteReason) -> DecisionRecord:
        query, ranking = decision.query, decision.ranking
        num_exact = 0
        if ranking.best_cached:
            num_exact = self._index.num_exact(ranking.best.replica_id, decision.request.hints)
        exact_tokens = usable_tokens(num_exact, query.num_prompt_tokens, self._block_size)
        return DecisionRecord(
            query.request_id,
            ranking.decided_at,
            decision.policy.name,
            decision.request.shape,
            ranking,
            query.excluded,
            reason,
            decision.available_tokens,
            min(exact_tokens, ranking.best_cached),  # without what is not worth copying from host memory
            decision.request.heir,
            decision.hot_copy,
        )

    def _reservation(
        self, request_id: RequestId, cached_tokens: int, shape: RequestShape, now: float
    ) -> Reservation:
        uncached = shape.num_prompt_tokens - cached_tokens
        return Reservation(request_id, uncached, cached_tokens, -(-uncached // self._block_size), now)


def _reason(policy: Policy, ranking: Ranking, most_cached: int) -> RouteReason:
    if not policy.uses_prefix:
        return RouteReason.TURN
    if not ranking.is_best_matched:
        return RouteReason.BLIND
    if not most_cached:
        return RouteReason.COLD
    return RouteReason.PREFIX if ranking.best_cached == most_cached else RouteReason.LOAD
