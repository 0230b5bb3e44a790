"""Which replica gets this request: one `Routing` per process and deployment, free of Ray.

    choose = match -> cost -> pick -> reserve (and predict)

Knows block hashes, load and replica names; knows neither text, HTTP, sockets nor Ray. Every public
method belongs to the router's event loop, returns without waiting, and is called from nowhere else.
Life of one request: `choose` books it, `routed` moves the booking to whoever accepted it, `release` (in
the caller's `finally`) ends it. The registry at the end is what a process shares between its HTTP side
and Serve's routing hook.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache.block_hash import hints as to_hints
from cache.events import Digest, EventBatch, Load, Snapshot
from cache.messages import ReplicaInfo
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.config import RouterConfig
from router.cost import Candidate, RequestShape, recompute_weight
from router.decision import (
    DecisionRecord,
    Placement,
    ReplicaStatistics,
    RouteQuery,
    RouteReason,
    RoutingStatistics,
)
from router.errors import AllBusy, NoReplica
from router.event_stream import ResyncReason
from router.expectations import Expectations
from router.hash_trie import HashTrie
from router.hot_prefixes import HotPrefixes
from router.load import FleetLoad, QueueAverage, Reservation
from router.observer import RoutingObserver
from router.policies import Policy, PolicyContext, PolicyRequest, Scored, make_policy

__all__ = [
    "DecisionRecord",
    "Placement",
    "ReplicaStatistics",
    "RouteQuery",
    "RouteReason",
    "Routing",
    "RoutingStatistics",
    "get_routing",
    "register_routing",
    "unregister_routing",
]

MAX_RECORDS = 1024  # decisions kept to be explained
HOT_USES_PER_REPLICA = 8  # in a minute or two: a copy on each replica would be used that often
RETRY_AFTER_RANGE_S = (1.0, 30.0)  # what a refused client is told to wait, at least and at most

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    """What is remembered of a request between `choose` and `release`."""

    request: PolicyRequest
    excluded: frozenset[ReplicaId]
    policy: Policy
    accepted_by: ReplicaId | None = None


class Routing:
    """Decides, books, and follows what replicas say. An `EventSink`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng or random.Random(config.seed)
        self._block_size = config.fingerprint.block_size
        self._replicas: dict[ReplicaId, ReplicaInfo] = {}
        self._policies: dict[str, Policy] = {}
        self._policy = self._policy_named(config.policy)
        self._matched: set[ReplicaId] = set()  # those that carry this Router's fingerprint and keep prefixes
        self._lost: set[ReplicaId] = set()  # died, but still listed by whoever tells the membership
        self._silent: set[ReplicaId] = set()  # already warned about
        self._trie = HashTrie()
        self._expectations = Expectations(self._trie, config.predicted_ttl_s)
        self._loads = FleetLoad(
            clock, reservation_ttl_s=config.reservation_ttl_s, silent_after_s=config.silent_after_s
        )
        self._hot = HotPrefixes()
        self._queue = QueueAverage()
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._observers: list[RoutingObserver] = []
        self._membership_listeners: list[Callable[[Mapping[ReplicaId, ReplicaInfo]], None]] = []
        self._records: deque[DecisionRecord] = deque(maxlen=MAX_RECORDS)
        self._decisions: Counter[RouteReason] = Counter()
        self._resyncs: Counter[ResyncReason] = Counter()
        self._num_no_replica = 0
        self._num_all_busy = 0
        self._num_degraded = 0
        self._num_expired = 0
        self._num_malformed = 0

    # --- membership ---------------------------------------------------------------------------

    def update_replicas(self, replicas: Mapping[ReplicaId, ReplicaInfo]) -> None:
        """These replicas are running, and no others. O(changes + entries of replicas that left)."""
        self._lost &= replicas.keys()
        for replica_id in self._replicas.keys() - replicas.keys():
            self._remove(replica_id)
        for replica_id, info in replicas.items():
            if replica_id not in self._replicas and replica_id not in self._lost:
                self._add(replica_id, info)
        self._tell_membership()

    def replica_lost(self, replica_id: ReplicaId) -> None:
        """The replica died: forget it at once, and ignore it until the membership has let go of it."""
        self._lost.add(replica_id)
        if replica_id in self._replicas:
            self._remove(replica_id)
            self._tell_membership()

    def watch_membership(self, listener: Callable[[Mapping[ReplicaId, ReplicaInfo]], None]) -> None:
        """Call `listener` with the replicas after every change; it must not block."""
        self._membership_listeners.append(listener)

    def watch(self, observer: RoutingObserver) -> None:
        """Tell `observer` of every decision from now on, and of what comes of it."""
        self._observers.append(observer)
        for replica_id, info in self._replicas.items():
            observer.replica_added(replica_id, info)

    @property
    def replicas(self) -> Mapping[ReplicaId, ReplicaInfo]:
        """The replicas that may be chosen, draining and busy ones included."""
        return self._replicas

    # --- deciding -----------------------------------------------------------------------------

    def choose(self, query: RouteQuery) -> Placement:
        """Pick a replica, book the request there, and expect its blocks there.

        A second call for a request in flight replaces its booking (a retry). O(replicas + log(blocks)) and
        the blocks nobody is known to hold yet. Raises NoReplica, AllBusy, or ConfigError for an unknown
        policy; then nothing is booked.
        """
        now = self._clock()
        policy = self._policy_named(query.policy) if query.policy else self._policy
        hints = to_hints(query.block_hashes)
        known = self._match(hints, query.num_prompt_tokens)
        candidates = self._admissible(known, query)
        shape = self._shape(hints, query.num_prompt_tokens, candidates, now)
        request = PolicyRequest(query.request_id, shape, hints, query.prompt)
        ranked = policy.rank(candidates, request)
        reason = _reason(policy, ranked)
        record = self._record(query, request, policy, ranked, reason, known, now)
        self._reserve(query.request_id, ranked[0].candidate, shape, now)
        self._predict(query.request_id, ranked[0].candidate, hints, now)
        policy.routed(ranked[0].replica_id, request)
        self._in_flight[query.request_id] = _InFlight(request, query.excluded, policy)
        self._tell_decision(record, query, hints)
        return self._placement(query, policy, ranked, reason)

    def rerank(self, request_id: RequestId, candidates: Sequence[ReplicaId]) -> list[ReplicaId]:
        """Order these replicas for a request already chosen for, under the same reservation.

        For when nobody in the first ranks accepted. Excluded replicas are left out; draining and full
        ones come last, unknown ones behind them: whoever is asked may still say no.
        """
        flight = self._in_flight.get(request_id)
        if flight is None:
            flight = _InFlight(PolicyRequest(request_id, RequestShape(1)), frozenset(), self._policy)
        wanted = [replica_id for replica_id in candidates if replica_id not in flight.excluded]
        matched = self._match(flight.request.hints, flight.request.shape.num_prompt_tokens)
        known = [c for c in matched if c.replica_id in wanted]
        open_ = [c for c in known if not (c.load.is_draining or c.load.is_full)]
        shut = [c for c in known if c.load.is_draining or c.load.is_full]
        ranks = [scored.replica_id for scored in flight.policy.rank(open_, flight.request)] if open_ else []
        ranks += [c.replica_id for c in sorted(shut, key=lambda c: (c.load.is_draining, c.load.num_requests))]
        placed = set(ranks)
        return ranks + [replica_id for replica_id in wanted if replica_id not in placed]

    def routed(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """This replica accepted the request: the booking moves there if it is elsewhere."""
        flight = self._in_flight.get(request_id)
        if flight is None:
            return
        flight.accepted_by = replica_id
        if replica_id not in self._replicas or self._loads.placed(request_id) == replica_id:
            return
        now = self._clock()
        hints, shape = flight.request.hints, flight.request.shape
        overlap = self._trie.match(hints).get(replica_id, 0) if replica_id in self._matched else 0
        cached = self._usable_tokens(overlap, shape.num_prompt_tokens)
        self._loads.move(replica_id, self._reservation(request_id, cached, shape, now))
        flight.policy.routed(replica_id, flight.request)
        if replica_id in self._matched:
            self._expectations.expect(request_id, replica_id, hints, now)
        else:
            self._expectations.drop(request_id)

    def accepted_by(self, request_id: RequestId) -> ReplicaId | None:
        """Who accepted the request in flight, also after that replica was lost; None: nobody has yet."""
        flight = self._in_flight.get(request_id)
        return flight.accepted_by if flight is not None else None

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        """That replica has computed the first token, with so much of the prompt from its cache."""
        self._expectations.keep(request_id)
        for observer in self._observers:
            observer.first_token(request_id, replica_id, cached_tokens)

    def release(self, request_id: RequestId) -> None:
        """The attempt is over, however it ended. Idempotent."""
        self._in_flight.pop(request_id, None)
        self._expectations.drop(request_id)
        self._loads.release(request_id)

    def finish(
        self, request_id: RequestId, *, block_hashes: Sequence[BlockHash] = (), num_output_tokens: int = 0
    ) -> None:
        """The request is over, after all its attempts; once per request.

        block_hashes: chain of the full blocks of prompt and output, () if unknown.
        """
        self.release(request_id)
        hints = to_hints(block_hashes)
        for policy in self._policies.values():
            policy.finished(request_id, hints)
        for observer in self._observers:
            observer.finished(request_id, hints, num_output_tokens)

    # --- what replicas say (EventSink) --------------------------------------------------------

    def on_events(self, replica_id: ReplicaId, events: EventBatch | Snapshot) -> Digest | None:
        """Apply a batch or a snapshot. The digest of what is now indexed; None if it is not indexed."""
        if replica_id not in self._replicas:
            return None
        self._loads.report(replica_id, events.load)
        if replica_id not in self._matched:
            return None
        if isinstance(events, Snapshot):
            self._trie.replace(replica_id, events.hashes)
        else:
            self._trie.remove(replica_id, events.removed)
            self._trie.store(replica_id, events.stored)
        for observer in self._observers:
            observer.events(replica_id, events)
        return self._trie.digest(replica_id)

    def on_load(self, replica_id: ReplicaId, load: Load) -> None:
        if replica_id in self._replicas:
            self._loads.report(replica_id, load)

    def on_resync(self, replica_id: ReplicaId, reason: ResyncReason) -> None:
        self._resyncs[reason] += 1
        if reason is not ResyncReason.JOIN:
            logger.warning("resyncing", extra={"replica_id": replica_id, "reason": reason.value})
        if reason in (ResyncReason.EPOCH, ResyncReason.DRIFT) and replica_id in self._replicas:
            # Better to know nothing for the moment of a snapshot than something wrong.
            self._trie.remove_replica(replica_id)
            self._trie.add_replica(replica_id)

    def on_malformed(self, replica_id: ReplicaId) -> None:
        self._num_malformed += 1

    # --- questions ----------------------------------------------------------------------------

    def statistics(self) -> RoutingStatistics:
        """O(replicas)."""
        return RoutingStatistics(
            replicas=tuple(map(self._replica_statistics, self._replicas)),
            in_flight=len(self._in_flight),
            index_entries=self._trie.num_entries,
            index_bytes=self._trie.num_bytes(),
            decisions=dict(self._decisions),
            resyncs=dict(self._resyncs),
            no_replica=self._num_no_replica,
            all_busy=self._num_all_busy,
            degraded=self._num_degraded,
            expired_reservations=self._num_expired,
            malformed_events=self._num_malformed,
        )

    def records(self) -> tuple[DecisionRecord, ...]:
        """The latest decisions, oldest first."""
        return tuple(self._records)

    # --- the steps of `choose` ----------------------------------------------------------------

    def _match(self, hints: Sequence[HashHint], num_prompt_tokens: int) -> list[Candidate]:
        """Every known replica with its load and what it holds of this prompt."""
        now = self._clock()
        self._trie.expire(now)
        self._num_expired += self._loads.expire()
        held = self._trie.match(hints) if hints else {}
        candidates = []
        for replica_id, load in self._loads.views():
            if load.is_silent is not (replica_id in self._silent):
                self._note_silence(replica_id, load.is_silent)
            is_matched = replica_id in self._matched and not load.is_silent
            overlap = held.get(replica_id, 0) if is_matched else 0
            cached = self._usable_tokens(overlap, num_prompt_tokens)
            candidates.append(Candidate(replica_id, load, cached, is_matched))
        return candidates

    def _admissible(self, candidates: list[Candidate], query: RouteQuery) -> list[Candidate]:
        """Those that are alive, not draining and have room. Raises NoReplica or AllBusy."""
        alive = [c for c in candidates if not c.load.is_draining and c.replica_id not in query.excluded]
        if not alive:
            self._num_no_replica += 1
            raise NoReplica(len(candidates), len(query.excluded & self._replicas.keys()))
        admissible = [c for c in alive if not c.load.is_full]
        if not admissible:
            self._num_all_busy += 1
            least, most = RETRY_AFTER_RANGE_S
            backlog_s = min(c.load.backlog_s for c in alive)
            raise AllBusy(len(alive), retry_after_s=min(max(backlog_s, least), most))
        # While limits differ between replicas; where nobody's fits, the replica says so with its numbers.
        length = query.num_prompt_tokens + query.max_tokens
        fitting = [c for c in admissible if self._replicas[c.replica_id].max_model_len >= length]
        return fitting or admissible

    def _shape(
        self, hints: Sequence[HashHint], num_prompt_tokens: int, candidates: list[Candidate], now: float
    ) -> RequestShape:
        queued = sum([c.load.num_waiting for c in candidates]) / len(candidates)
        hot_blocks = self._hot.num_hot_blocks(hints, HOT_USES_PER_REPLICA * len(self._replicas))
        self._hot.record(hints, now)
        return RequestShape(
            num_prompt_tokens,
            hot_tokens=self._usable_tokens(hot_blocks, num_prompt_tokens),
            recompute_weight=recompute_weight(self._queue.update(queued, now)),
        )

    def _reserve(self, request_id: RequestId, candidate: Candidate, shape: RequestShape, now: float) -> None:
        reservation = self._reservation(request_id, candidate.cached_tokens, shape, now)
        self._loads.reserve(candidate.replica_id, reservation)

    def _predict(
        self, request_id: RequestId, candidate: Candidate, hints: Sequence[HashHint], now: float
    ) -> None:
        if candidate.is_matched:
            self._expectations.expect(request_id, candidate.replica_id, hints, now)
        else:
            self._expectations.drop(request_id)

    def _placement(
        self, query: RouteQuery, policy: Policy, ranked: list[Scored], reason: RouteReason
    ) -> Placement:
        ranks = tuple([scored.candidate.replica_id for scored in ranked])
        # Any of the ranks may end up with the request, so all of them must be able to read the hashes.
        shares_hashes = self._matched.issuperset(ranks)
        return Placement(
            request_id=query.request_id,
            ranks=ranks,
            overlap_blocks=ranked[0].candidate.cached_tokens // self._block_size,
            block_hashes=tuple(query.block_hashes) if shares_hashes else (),
            reason=reason,
            policy=policy.name,
        )

    def _record(
        self,
        query: RouteQuery,
        request: PolicyRequest,
        policy: Policy,
        ranked: list[Scored],
        reason: RouteReason,
        known: Sequence[Candidate],
        now: float,
    ) -> DecisionRecord:
        self._decisions[reason] += 1
        if not all([scored.candidate.is_matched for scored in ranked]):
            self._num_degraded += 1
        best = ranked[0].candidate
        num_exact = self._trie.num_exact(best.replica_id, request.hints) if best.cached_tokens else 0
        record = DecisionRecord(
            query.request_id,
            now,
            policy.name,
            request.shape,
            tuple(ranked),
            query.excluded,
            reason,
            available_tokens=max([candidate.cached_tokens for candidate in known]),
            exact_tokens=self._usable_tokens(num_exact, query.num_prompt_tokens),
        )
        self._records.append(record)
        return record

    def _tell_decision(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        for observer in self._observers:
            observer.decided(record, query, hints)

    # --- small parts --------------------------------------------------------------------------

    def _policy_named(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            # The options belong to the configured policy; another one, asked for by name, has its defaults.
            options = self._config.policy_options if name == self._config.policy else {}
            context = PolicyContext(self._block_size, self._clock, self._rng)
            policy = make_policy(name, options, context=context)
            for replica_id, info in self._replicas.items():
                policy.replica_added(replica_id, info)
            self._policies[name] = policy
        return policy

    def _add(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._replicas[replica_id] = info
        self._loads.add_replica(replica_id, info)
        self._trie.add_replica(replica_id)
        for policy in self._policies.values():
            policy.replica_added(replica_id, info)
        for observer in self._observers:
            observer.replica_added(replica_id, info)
        if not info.has_prefix_cache:
            return  # by its own choice: routed by load alone, without a warning
        if info.fingerprint == self._config.fingerprint:
            self._matched.add(replica_id)
        else:
            logger.warning("fingerprint differs, routing by load alone", extra={"replica_id": replica_id})

    def _tell_membership(self) -> None:
        for listener in self._membership_listeners:
            listener(self._replicas)

    def _remove(self, replica_id: ReplicaId) -> None:
        del self._replicas[replica_id]
        self._matched.discard(replica_id)
        self._loads.remove_replica(replica_id)
        self._trie.remove_replica(replica_id)
        for policy in self._policies.values():
            policy.replica_removed(replica_id)
        for observer in self._observers:
            observer.replica_removed(replica_id)
        self._silent.discard(replica_id)

    def _note_silence(self, replica_id: ReplicaId, is_silent: bool) -> None:
        if is_silent:
            self._silent.add(replica_id)
            logger.warning("replica is silent, routing by load alone", extra={"replica_id": replica_id})
        else:
            self._silent.discard(replica_id)
            logger.info("replica is heard again", extra={"replica_id": replica_id})

    def _usable_tokens(self, overlap_blocks: int, num_prompt_tokens: int) -> int:
        """Tokens of a prefix hit; at least one token of a prompt is always computed."""
        usable = max(0, (num_prompt_tokens - 1) // self._block_size)
        return min(overlap_blocks, usable) * self._block_size

    def _reservation(
        self, request_id: RequestId, cached_tokens: int, shape: RequestShape, now: float
    ) -> Reservation:
        uncached = shape.num_prompt_tokens - cached_tokens
        return Reservation(request_id, uncached, cached_tokens, -(-uncached // self._block_size), now)

    def _replica_statistics(self, replica_id: ReplicaId) -> ReplicaStatistics:
        view, load = self._loads.view(replica_id), self._loads[replica_id]
        return ReplicaStatistics(
            replica_id=replica_id,
            is_matched=replica_id in self._matched,
            is_silent=view.is_silent,
            is_draining=view.is_draining,
            in_flight=load.num_in_flight,
            unseen=load.num_unseen,
            backlog_s=view.backlog_s,
            num_running=load.load.num_running,
            num_waiting=load.load.num_waiting,
            num_blocks=self._trie.num_blocks(replica_id),
        )


def _reason(policy: Policy, ranked: list[Scored]) -> RouteReason:
    best = ranked[0].candidate
    if not policy.uses_prefix:
        return RouteReason.TURN
    if not best.is_matched:
        return RouteReason.BLIND
    most = max([scored.candidate.cached_tokens for scored in ranked])
    if not most:
        return RouteReason.COLD
    return RouteReason.PREFIX if best.cached_tokens == most else RouteReason.LOAD


# One Routing per process and deployment. Serve ships the module of a routing hook by value but imports
# this one by reference, so both sides of a process find the same object here. Event loop only.
_routings: dict[str, Routing] = {}


def register_routing(key: str, routing: Routing) -> None:
    """Make `routing` findable under `key`. Raises ValueError if another one is registered there."""
    if _routings.setdefault(key, routing) is not routing:
        raise ValueError(f"another Routing is registered as {key!r}")


def unregister_routing(key: str) -> None:
    """Inverse of `register_routing`. Idempotent."""
    _routings.pop(key, None)


def get_routing(key: str) -> Routing:
    """The registered Routing. Raises LookupError: whoever opens the handle must register first."""
    try:
        return _routings[key]
    except KeyError:
        raise LookupError(f"no Routing is registered as {key!r} in this process") from None
