"""Which replica gets this request: one `Routing` per process and deployment, free of Ray.

    choose = weigh: match -> cost -> pick;  book: reserve -> predict

Knows block hashes, load and replica names; knows neither text, HTTP, sockets nor Ray. Every public
method belongs to the router's event loop, returns without waiting, and is called from nowhere else.
Life of one request: `choose` books it (or `weigh` and then, when it is to go, `book`), `routed` moves the
booking to whoever accepted it, `release` (in the caller's `finally`) ends it, `finish` says what came of it.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn

from cache.block_hash import hint_view as to_hints
from cache.events import Digest, EventBatch, Load, Snapshot
from cache.messages import ReplicaInfo
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.config import RouterConfig
from router.errors import AllBusy, NoReplica
from router.events.event_stream import ResyncReason
from router.index.prefix_index import PrefixIndex
from router.placement.admission import RETRY_AFTER_RANGE_S
from router.placement.decision import (
    Decision,
    DecisionRecord,
    Placement,
    RouteQuery,
    RouteReason,
)
from router.placement.fleet import Fleet
from router.placement.inheritance import LEAST_COPIES, Inheritance, heir
from router.placement.late_replicas import LateReplicas
from router.placement.observer import RoutingObserver
from router.placement.policy_set import PolicySet
from router.placement.ranking import Ranking, candidates_of, ranking_of
from router.placement.routing_statistics import (
    FleetStatistics,
    ReplicaStatistics,
    RoutingCounts,
    RoutingStatistics,
    replica_statistics,
)
from router.placement.shaper import Shaper, usable_tokens
from router.policies import Policy, PolicyContext, PolicyRequest
from router.policies.base import alone
from router.policies.expected_time import ExpectedTime
from router.pricing.cost import RequestShape, prefill_s
from router.pricing.fleet_load import FleetLoad
from router.pricing.replica_load import ReplicaState, Reservation
from router.pricing.waiting import level_s, start_s

__all__ = [
    "DecisionRecord",
    "Placement",
    "ReplicaStatistics",
    "RouteQuery",
    "RouteReason",
    "Routing",
    "RoutingStatistics",
]

MAX_RECORDS = 1024  # decisions kept to be explained
MAX_RANKS = 8  # replicas named to Serve; when all of them refuse, it asks for the others

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    """What is remembered of a request between `choose` and `release`."""

    request: PolicyRequest
    excluded: frozenset[ReplicaId]
    policy: Policy
    accepted_by: ReplicaId | None = None
    first_token_at: float | None = None  # seconds, the clock's


class Routing:
    """Decides, books, and follows what replicas say. An `EventSink`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        peers: Callable[[], tuple[int, int]] = alone,
    ) -> None:
        """peers: this router's place among the routers of the same replicas, and their number."""
        self._config = config
        self._clock = clock
        self._block_size = config.fingerprint.block_size
        self._fleet = Fleet(config.fingerprint)
        self._peers = peers
        context = PolicyContext(self._block_size, clock, rng or random.Random(config.seed), peers)
        self._policies = PolicySet(config, context, self._fleet.members)
        self._shaper = Shaper(self._block_size, self._policies.expected_time, peers)
        self._num_held = 0  # requests that wait at this router
        self._index = PrefixIndex(config.predicted_ttl_s)
        self._loads = FleetLoad(
            clock, reservation_ttl_s=config.reservation_ttl_s, silent_after_s=config.silent_after_s
        )
        self._late = LateReplicas(self._loads, clock)
        self._inheritance = Inheritance()
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._observers: list[RoutingObserver] = []
        self._membership_listeners: list[Callable[[Mapping[ReplicaId, ReplicaInfo]], None]] = []
        self._load_listeners: list[Callable[[], None]] = []
        self._records: deque[DecisionRecord] = deque(maxlen=MAX_RECORDS)
        self._counts = RoutingCounts()

    # --- membership ---------------------------------------------------------------------------

    def update_replicas(self, replicas: Mapping[ReplicaId, ReplicaInfo]) -> None:
        """These replicas are running, and no others. O(changes + entries of replicas that left)."""
        for replica_id in self._fleet.leaving(replicas):
            self._remove(replica_id)
            self._inheritance.replica_left(self._clock())
        for replica_id, info in self._fleet.joining(replicas).items():
            self._add(replica_id, info)
        self._tell_membership()

    def replica_lost(self, replica_id: ReplicaId) -> None:
        """The replica died: forget it at once, and ignore it until the membership has let go of it."""
        self._fleet.lose(replica_id)
        if replica_id in self._fleet:
            self._remove(replica_id)
            self._inheritance.replica_left(self._clock())
            self._tell_membership()

    def watch_membership(self, listener: Callable[[Mapping[ReplicaId, ReplicaInfo]], None]) -> None:
        """Call `listener` with the replicas after every change; it must not block."""
        self._membership_listeners.append(listener)

    def watch_load(self, listener: Callable[[], None]) -> None:
        """Call `listener` after whatever may free a replica: a report, a release, a change of membership.

        Often, and before that is acted on: it must only take note.
        """
        self._load_listeners.append(listener)

    def watch(self, observer: RoutingObserver) -> None:
        """Tell `observer` of every decision from now on, and of what comes of it."""
        self._observers.append(observer)
        for replica_id, info in self._fleet.members.items():
            observer.replica_added(replica_id, info)

    @property
    def replicas(self) -> Mapping[ReplicaId, ReplicaInfo]:
        """The replicas that may be chosen, draining and busy ones included."""
        return self._fleet.members

    # --- deciding -----------------------------------------------------------------------------

    def choose(self, query: RouteQuery) -> Placement:
        """Pick a replica, book the request there, and expect its blocks there.

        A second call for a request in flight replaces its booking (a retry). O(replicas + log(blocks)) and
        the blocks nobody is known to hold yet. Raises NoReplica, AllBusy, or ConfigError for an unknown
        policy; then nothing is booked.
        """
        try:
            return self.book(self.weigh(query))
        except (AllBusy, NoReplica) as error:
            self.note_refused(error)
            raise

    def weigh(self, query: RouteQuery, *, earlier: Decision | None = None) -> Decision:
        """Where the request should go as things are; books nothing. Raises as `choose` does.

        earlier: what was decided about the same query before, to save work.
        """
        now = self._clock()
        policy = self._policies.named(query.policy) if query.policy else self._policies.configured
        hints = to_hints(query.block_hashes) if earlier is None else earlier.request.hints
        held = self._match(hints, now)
        states = self._admissible(query, now)
        everybody = len(states) == len(self._loads)
        cached = self._cached(states, held, query.num_prompt_tokens)
        is_settling = self._inheritance.is_open(now)
        shape = self._shaper.shape(
            hints,
            query.num_prompt_tokens,
            cached,
            self._loads.num_waiting() if everybody else sum([state.num_waiting for state in states]),
            self._num_held,
            now,
            least_copies=LEAST_COPIES if is_settling else 0,
        )
        heir_id = self._heir(hints, query, states, cached) if is_settling else None
        request = PolicyRequest(query.request_id, shape, hints, query.prompt, heir_id)
        ranking = self._rank(policy, states, cached, request, now)
        available = max(cached) if everybody else self._most_available(held, query.num_prompt_tokens)
        price = ranking.best.price
        own_s = prefill_s(price, query.num_prompt_tokens, ranking.best_cached) if price is not None else 0.0
        return Decision(query, request, policy, ranking, available, own_s)

    def book(self, decision: Decision) -> Placement:
        """Act on a decision just taken: reserve, and expect its blocks there."""
        query, request, policy, ranking = decision.query, decision.request, decision.policy, decision.ranking
        now, hints, best_id = ranking.decided_at, request.hints, ranking.best.replica_id
        reason = _reason(policy, ranking)
        record = self._record(decision, reason)
        reservation = self._reservation(query.request_id, ranking.best_cached, request.shape, now)
        self._loads.reserve(best_id, reservation)
        is_priced = ranking.best.price is not None
        expected_s = decision.start_s + decision.prefill_s if is_priced else None
        self._late.sent(query.request_id, best_id, expected_s)
        if ranking.is_best_matched:
            self._index.expect(query.request_id, best_id, hints, now)
        else:
            self._index.drop(query.request_id)
        self._shaper.routed(hints, query.num_prompt_tokens, now)
        policy.routed(best_id, request)
        self._in_flight[query.request_id] = _InFlight(request, query.excluded, policy)
        for observer in self._observers:
            observer.decided(record, query, hints)
        return self._placement(decision, reason)

    def free_replicas(self, within_s: float) -> tuple[int, list[ReplicaState]]:
        """How many replicas may be chosen, now or in time; and those that would start so soon on new work.

        Draining ones are neither, full ones may be chosen in time. O(replicas).
        """
        states, limit = self._loads.states(), self._clock() + within_s
        num_open = sum([not state.load.is_draining for state in states])
        return num_open, [s for s in states if s.busy_until <= limit and not s.is_shut]

    def could_win(self, earlier: Decision, free: Sequence[ReplicaState]) -> bool:
        """Whether weighing it anew might choose one of these. O(these).

        False is certain but for what time alone changes and what has become cached in the meantime: weigh
        anew now and then.
        """
        best_id, policy = earlier.ranking.best.replica_id, earlier.policy
        rivals = [state for state in free if state.replica_id not in earlier.query.excluded]
        if not rivals:
            return False
        if best_id not in self._loads or not isinstance(policy, ExpectedTime):
            return True
        best = self._loads[best_id].state()
        if best.is_shut or any([state.replica_id == best_id for state in rivals]):
            return True
        states = [best, *rivals]
        cached = [earlier.ranking.cached_by(state.replica_id) for state in states]
        return policy.is_beaten(states, cached, earlier.request, self._clock())

    def wait_s(self, held_s: float = 0.0) -> float:
        """Seconds until the fleet could start on a newcomer, when so much work held here goes before it.

        0 when none is there. O(replicas), and sorting them.
        """
        now = self._clock()
        states = [s for s in self._loads.states() if not s.load.is_draining]
        # What a silent one has queued is not known to get shorter.
        states = [s for s in states if now <= s.silent_at] or states
        residence, most = self._loads.residence, self._config.max_wait_s or 0.0
        starts = [start_s(s, now, residence, max_wait_s=most) for s in states]
        # Requests come to the routers alike: the others hold about as much.
        return level_s(starts, held_s * self._peers()[1])

    def share_s(self, held_s: float) -> float:
        """Of each replica's time, when so much work is held here and the other routers hold about as much."""
        return held_s * self._peers()[1] / max(1, len(self._loads))

    def note_held(self, num_held: int) -> None:
        """So many requests wait at this router for a replica: they count as queued."""
        self._num_held = num_held

    def note_refused(self, error: AllBusy | NoReplica) -> None:
        """A request was refused for that."""
        self._counts.refused(error)

    def rerank(self, request_id: RequestId, candidates: Sequence[ReplicaId]) -> list[ReplicaId]:
        """Order these replicas for a request already chosen for, under the same reservation.

        For when nobody in the first ranks accepted. Excluded replicas are left out; draining and full
        ones come last, unknown ones behind them: whoever is asked may still say no.
        """
        now = self._clock()
        flight = self._in_flight.get(request_id)
        if flight is None:
            flight = _InFlight(
                PolicyRequest(request_id, RequestShape(1)), frozenset(), self._policies.configured
            )
        request = flight.request
        wanted = [replica_id for replica_id in candidates if replica_id not in flight.excluded]
        held = self._match(request.hints, now)
        known = [state for state in self._loads.states() if state.replica_id in wanted]
        open_ = [s for s in known if not (s.load.is_draining or s.is_full(now))]
        shut = [s for s in known if s.load.is_draining or s.is_full(now)]
        ranks: list[ReplicaId] = []
        if open_:
            cached = self._cached(open_, held, request.shape.num_prompt_tokens)
            ranks += self._rank(flight.policy, open_, cached, request, now).replica_ids(len(open_))
        shut.sort(key=lambda state: (state.load.is_draining, state.num_requests_at(now)))
        ranks += [state.replica_id for state in shut]
        placed = set(ranks)
        return ranks + [replica_id for replica_id in wanted if replica_id not in placed]

    def routed(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """This replica accepted the request: the booking moves there if it is elsewhere."""
        flight = self._in_flight.get(request_id)
        if flight is None:
            return
        flight.accepted_by = replica_id
        self._index.served(request_id, replica_id)
        self._late.moved(request_id, replica_id)
        if replica_id not in self._fleet or self._loads.placed(request_id) == replica_id:
            return
        now = self._clock()
        hints, shape = flight.request.hints, flight.request.shape
        overlap = self._index.match(hints).get(replica_id, 0)
        cached = usable_tokens(overlap, shape.num_prompt_tokens, self._block_size)
        self._loads.move(replica_id, self._reservation(request_id, cached, shape, now))
        flight.policy.routed(replica_id, flight.request)
        self._index.expect(request_id, replica_id, hints, now)

    def accepted_by(self, request_id: RequestId) -> ReplicaId | None:
        """Who accepted the request in flight, also after that replica was lost; None: nobody has yet."""
        flight = self._in_flight.get(request_id)
        return flight.accepted_by if flight is not None else None

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        """That replica has computed the first token, with so much of the prompt from its cache."""
        self._index.keep(request_id)
        if (flight := self._in_flight.get(request_id)) is not None:
            flight.first_token_at = self._clock()
        self._late.answered(request_id)
        for observer in self._observers:
            observer.first_token(request_id, replica_id, cached_tokens)

    def continued(self, request_id: RequestId) -> None:
        """Another replica has gone on with an answer that had its first token before."""
        self._late.answered(request_id)

    def release(self, request_id: RequestId) -> bool:
        """The attempt is over, however it ended; whether there was one. Idempotent."""
        flight = self._in_flight.pop(request_id, None)
        if flight is None:
            return False
        if flight.first_token_at is not None:
            self._loads.residence.observe(self._clock() - flight.first_token_at)
        self._index.drop(request_id)
        self._late.answered(request_id)
        self._loads.release(request_id)
        self._tell_load()
        return True

    def finish(
        self, request_id: RequestId, *, block_hashes: Sequence[BlockHash] = (), num_output_tokens: int = 0
    ) -> None:
        """The request is over, after all its attempts; once per request.

        block_hashes: chain of the full blocks of prompt and output, () if unknown.
        """
        self.release(request_id)
        hints = to_hints(block_hashes)
        self._index.finish(request_id, hints)
        self._policies.finished(request_id, hints)
        for observer in self._observers:
            observer.finished(request_id, hints, num_output_tokens)

    # --- what replicas say (EventSink) --------------------------------------------------------

    def on_events(self, replica_id: ReplicaId, events: EventBatch | Snapshot) -> Digest | None:
        """Apply a batch or a snapshot. The digest of what is now indexed; None if it is not indexed."""
        if replica_id not in self._fleet:
            return None
        self._report(replica_id, events.load)
        if replica_id not in self._index:
            return None
        digest = self._index.apply(replica_id, events)
        for observer in self._observers:
            observer.events(replica_id, events)
        return digest

    def on_snapshot(self, replica_id: ReplicaId, snapshot: Snapshot) -> Generator[None, None, Digest | None]:
        """Apply a snapshot's hashes in slices, one with each step; its load is not reported here."""
        info = self._fleet.members.get(replica_id)
        if info is None or replica_id not in self._index:
            return None
        with closing(self._index.apply_in_slices(replica_id, snapshot)) as slices:
            for _ in slices:
                yield
                if self._fleet.members.get(replica_id) is not info:
                    return None  # it has left, and perhaps another one has its name
        for observer in self._observers:
            observer.events(replica_id, snapshot)
        return self._index.digest(replica_id)

    def on_load(self, replica_id: ReplicaId, load: Load) -> None:
        if replica_id in self._fleet:
            self._report(replica_id, load)

    def on_resync(self, replica_id: ReplicaId, reason: ResyncReason) -> None:
        self._counts.resyncs[reason] += 1
        if reason is not ResyncReason.JOIN:
            logger.warning("resyncing", extra={"replica_id": replica_id, "reason": reason.value})
        if reason in (ResyncReason.EPOCH, ResyncReason.DRIFT) and replica_id in self._index:
            # Better to know nothing for the moment of a snapshot than something wrong.
            self._index.forget(replica_id, self._fleet.members[replica_id])

    def on_malformed(self, replica_id: ReplicaId) -> None:
        self._counts.malformed += 1

    # --- questions ----------------------------------------------------------------------------

    def fleet_statistics(self) -> FleetStatistics:
        """O(replicas)."""
        return FleetStatistics(
            replicas=self._replica_statistics(),
            in_flight=len(self._in_flight),
            held=self._num_held,
            no_replica=self._counts.no_replica,
            all_busy=self._counts.all_busy,
        )

    def statistics(self) -> RoutingStatistics:
        """O(replicas + what the index expects): milliseconds while thousands of prompts are under way."""
        index, counts = self._index, self._counts
        return RoutingStatistics(
            replicas=self._replica_statistics(),
            in_flight=len(self._in_flight),
            held=self._num_held,
            index_entries=index.num_entries,
            index_bytes=index.num_bytes(),
            index_refused=index.num_refused,
            decisions=dict(counts.decisions),
            resyncs=dict(counts.resyncs),
            no_replica=counts.no_replica,
            all_busy=counts.all_busy,
            degraded=counts.degraded,
            expired_reservations=counts.expired,
            malformed_events=counts.malformed,
        )

    def _replica_statistics(self) -> tuple[ReplicaStatistics, ...]:
        return tuple([replica_statistics(name, self._loads, self._index) for name in self._fleet])

    def records(self) -> tuple[DecisionRecord, ...]:
        """The latest decisions, oldest first."""
        return tuple(self._records)

    # --- the steps of `choose` ----------------------------------------------------------------

    def _match(self, hints: Sequence[HashHint], now: float) -> Mapping[ReplicaId, int]:
        """Leading blocks of the prompt each replica holds; those that hold none, or are silent, left out."""
        self._index.expire(now)
        self._counts.expired += self._loads.expire()
        self._fleet.note_silences(self._loads.states, now)
        self._late.look()
        held = self._index.match(hints) if hints else {}
        silent = self._fleet.silent
        if silent and held:
            return {name: overlap for name, overlap in held.items() if name not in silent}
        return held

    def _admissible(self, query: RouteQuery, now: float) -> list[ReplicaState]:
        """Those that are alive, not draining and have room. Raises NoReplica or AllBusy."""
        if self._fleet.silent or query.excluded:
            states = [s for s in self._loads.states() if s.replica_id not in query.excluded]
            states = [s for s in states if not (s.load.is_draining or s.is_full(now))]
        else:
            states = self._loads.open_states()
        if not states:
            self._turn_away(self._loads.states(), query, now)
        length = query.num_prompt_tokens + query.max_tokens
        if length > self._fleet.least_model_len:
            # While limits differ between replicas; where nobody's fits, the replica says so with its numbers.
            return [state for state in states if state.info.max_model_len >= length] or states
        return states

    def _turn_away(self, known: Sequence[ReplicaState], query: RouteQuery, now: float) -> NoReturn:
        alive = [s for s in known if not (s.load.is_draining or s.replica_id in query.excluded)]
        if not alive:
            raise NoReplica(len(known), len(query.excluded & self._fleet.members.keys()))
        least, most = RETRY_AFTER_RANGE_S
        backlog_s = min(state.backlog_s(now) for state in alive)
        raise AllBusy(len(alive), retry_after_s=min(max(backlog_s, least), most))

    def _cached(
        self, states: Sequence[ReplicaState], held: Mapping[ReplicaId, int], num_prompt_tokens: int
    ) -> list[int]:
        """Usable tokens of the prompt each of these holds."""
        if not held:
            return [0] * len(states)
        size = self._block_size
        usable = max(0, (num_prompt_tokens - 1) // size)
        if max(held.values()) > usable:
            held = {replica_id: min(overlap, usable) for replica_id, overlap in held.items()}
        everybody = len(states) == len(self._loads)
        names = self._loads.names() if everybody else [state.replica_id for state in states]
        overlap_of = held.get
        return [overlap_of(name, 0) * size for name in names]

    def _heir(
        self,
        hints: Sequence[HashHint],
        query: RouteQuery,
        states: Sequence[ReplicaState],
        cached: Sequence[int],
    ) -> ReplicaId | None:
        """Who is to be the only one to hold the prompt's hot prefix; None if several do, or it has none."""
        found = self._shaper.hot_prefix(hints, query.num_prompt_tokens)
        if found is None:
            return None
        last, hot_tokens = found
        holders = [s.replica_id for s, held in zip(states, cached, strict=True) if held >= hot_tokens]
        if holders:
            return holders[0] if len(holders) == 1 else None
        readable = [s.replica_id for s in states if s.replica_id in self._index]
        return heir(last, readable) if readable else None

    def _most_available(self, held: Mapping[ReplicaId, int], num_prompt_tokens: int) -> int:
        """Usable tokens of the prompt that some replica holds, also one that may not be chosen now."""
        # A snapshot on its way in is in the index under a name that is no replica's.
        members = self._fleet.members
        most_held = max([held[name] for name in held if name in members], default=0)
        return usable_tokens(most_held, num_prompt_tokens, self._block_size)

    def _rank(
        self,
        policy: Policy,
        states: Sequence[ReplicaState],
        cached: Sequence[int],
        request: PolicyRequest,
        now: float,
    ) -> Ranking:
        unmatched = self._fleet.blind
        if isinstance(policy, ExpectedTime):
            order, costs = policy.order(states, cached, request, now)
            return Ranking(states, cached, costs, order, unmatched, now)
        scored = policy.rank(candidates_of(states, cached, unmatched, now), request)
        return ranking_of(scored, states, cached, unmatched, now)

    def _placement(self, decision: Decision, reason: RouteReason) -> Placement:
        query, ranking = decision.query, decision.ranking
        # Anybody may end up with the request, so all of them must be able to read the hashes.
        shares_hashes = self._fleet.unmatched <= query.excluded
        return Placement(
            request_id=query.request_id,
            ranks=ranking.replica_ids(MAX_RANKS),
            overlap_blocks=ranking.best_cached // self._block_size,
            block_hashes=query.block_hashes if shares_hashes else (),
            reason=reason,
            policy=decision.policy.name,
        )

    def _record(self, decision: Decision, reason: RouteReason) -> DecisionRecord:
        query, ranking = decision.query, decision.ranking
        self._counts.decisions[reason] += 1
        if ranking.unmatched and any([s.replica_id in ranking.unmatched for s in ranking.states]):
            self._counts.degraded += 1
        num_exact = 0
        if ranking.best_cached:
            num_exact = self._index.num_exact(ranking.best.replica_id, decision.request.hints)
        record = DecisionRecord(
            query.request_id,
            ranking.decided_at,
            decision.policy.name,
            decision.request.shape,
            ranking,
            query.excluded,
            reason,
            decision.available_tokens,
            usable_tokens(num_exact, query.num_prompt_tokens, self._block_size) if num_exact else 0,
        )
        self._records.append(record)
        return record

    # --- small parts --------------------------------------------------------------------------

    def _add(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._loads.add_replica(replica_id, info)
        if self._fleet.add(replica_id, info):
            self._index.add_replica(replica_id, info)
        self._policies.replica_added(replica_id, info)
        for observer in self._observers:
            observer.replica_added(replica_id, info)

    def _remove(self, replica_id: ReplicaId) -> None:
        self._fleet.remove(replica_id)
        self._loads.remove_replica(replica_id)
        self._index.remove_replica(replica_id)
        self._policies.replica_removed(replica_id)
        for observer in self._observers:
            observer.replica_removed(replica_id)

    def _tell_membership(self) -> None:
        for listener in self._membership_listeners:
            listener(self._fleet.members)
        self._tell_load()

    def _tell_load(self) -> None:
        for listener in self._load_listeners:
            listener()

    def _report(self, replica_id: ReplicaId, load: Load) -> None:
        if load.is_draining and not self._loads[replica_id].load.is_draining:
            self._inheritance.replica_left(self._clock())
        self._loads.report(replica_id, load)
        self._fleet.heard(replica_id)
        self._tell_load()

    def _reservation(
        self, request_id: RequestId, cached_tokens: int, shape: RequestShape, now: float
    ) -> Reservation:
        uncached = shape.num_prompt_tokens - cached_tokens
        return Reservation(request_id, uncached, cached_tokens, -(-uncached // self._block_size), now)


def _reason(policy: Policy, ranking: Ranking) -> RouteReason:
    if not policy.uses_prefix:
        return RouteReason.TURN
    if not ranking.is_best_matched:
        return RouteReason.BLIND
    most = max(ranking.cached)
    if not most:
        return RouteReason.COLD
    return RouteReason.PREFIX if ranking.best_cached == most else RouteReason.LOAD
