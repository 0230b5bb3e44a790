"""Which replica gets this request: one `Routing` per process and deployment, free of Ray.

    choose = weigh: match -> cost -> pick (`weighing.py`);  book: reserve -> predict (`booking.py`)

It owns what both stand on: who the replicas are, what they say, and who is to hear of what is decided. Knows
block hashes, load and replica names; knows neither text, HTTP, sockets nor Ray. Every public method belongs
to the router's event loop, returns without waiting, and is called from nowhere else.
Life of one request: `choose` books it (or `weigh` and then, when it is to go, `book`), `routed` moves the
booking to whoever accepted it, `release` (in the caller's `finally`) ends it, `finish` says what came of it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing

from cache.block_hash import hint_view as to_hints
from cache.events import Digest, EventBatch, Load, RequestEnded, Snapshot
from cache.messages import ReplicaInfo
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.config import RouterConfig
from router.errors import AllBusy, NoReplica
from router.events.event_stream import ResyncReason
from router.index.prefix_index import PrefixIndex
from router.placement.booking import Bookings, InFlight
from router.placement.copy_orders import CopyMaker, CopyOrders
from router.placement.decision import (
    Decision,
    DecisionRecord,
    Placement,
    RouteQuery,
    RouteReason,
)
from router.placement.fleet import Fleet
from router.placement.inheritance import Inheritance
from router.placement.late_replicas import LateReplicas
from router.placement.observer import RoutingObserver
from router.placement.policy_set import PolicySet
from router.placement.replica_queues import ReplicaQueues
from router.placement.routing_statistics import (
    FleetStatistics,
    ReplicaStatistics,
    RoutingCounts,
    RoutingStatistics,
    replica_statistics,
)
from router.placement.shaper import Shaper
from router.placement.weighing import NOBODY, Ahead, Weighing
from router.policies import PolicyContext, PolicyRequest
from router.policies.base import alone
from router.pricing.cost import RequestShape
from router.pricing.fleet_load import FleetLoad
from router.pricing.replica_state import ReplicaState

__all__ = [
    "DecisionRecord",
    "Placement",
    "ReplicaStatistics",
    "RouteQuery",
    "RouteReason",
    "Routing",
    "RoutingStatistics",
]

logger = logging.getLogger(__name__)


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
        self._clock = clock
        self.peers = peers
        self._fleet = Fleet(config.fingerprint)
        context = PolicyContext(
            config.fingerprint.block_size, clock, rng or random.Random(config.seed), peers
        )
        self._policies = PolicySet(config, context, self._fleet.members)
        self._index = PrefixIndex(config.predicted_ttl_s)
        self._loads = FleetLoad(
            clock,
            reservation_ttl_s=config.reservation_ttl_s,
            silent_after_s=config.silent_after_s,
            eviction_regret=self._policies.expected_time.options.eviction_regret,
            crowding_weight=self._policies.expected_time.options.crowding,
        )
        self._late = LateReplicas(self._loads, clock)
        self._inheritance = Inheritance()
        self.queues = ReplicaQueues(config.fingerprint.block_size, self._index.is_there)
        self._observers: list[RoutingObserver] = []
        self._membership_listeners: list[Callable[[Mapping[ReplicaId, ReplicaInfo]], None]] = []
        self._load_listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[RequestEnded], None]] = []
        self._counts = RoutingCounts()
        self._shaper = Shaper(config.fingerprint.block_size, self._policies.expected_time, peers)
        self._weighing = Weighing(
            config,
            clock,
            match=self._match,
            fleet=self._fleet,
            loads=self._loads,
            index=self._index,
            policies=self._policies,
            shaper=self._shaper,
            inheritance=self._inheritance,
            queues=self.queues,
            peers=peers,
        )
        self._bookings = Bookings(
            config,
            clock,
            fleet=self._fleet,
            loads=self._loads,
            index=self._index,
            policies=self._policies,
            shaper=self._shaper,
            late=self._late,
            queues=self.queues,
            observers=self._observers,
            counts=self._counts,
            peers=peers,
        )
        self._copies = CopyOrders(
            clock, config.fingerprint.block_size, self._weighing, self._bookings, self._fleet.members
        )

    # --- membership ---------------------------------------------------------------------------

    def update_replicas(self, replicas: Mapping[ReplicaId, ReplicaInfo | None]) -> None:
        """These replicas are running, and no others; of another model's nothing is asked, nor of one of None:
        what it told of itself cannot be read.

        O(replicas + entries of those that left).
        """
        ours = self._fleet.of_our_model(replicas)
        for replica_id in self._fleet.leaving(ours):
            self._remove(replica_id)
        for replica_id, info in self._fleet.joining(ours).items():
            self._add(replica_id, info)
        self._tell_membership()

    def replica_lost(self, replica_id: ReplicaId) -> None:
        """The replica died: forget it at once, and ignore it until the membership has let go of it."""
        self._fleet.lose(replica_id)
        if replica_id in self._fleet:
            self._remove(replica_id)
            self._tell_membership()

    def request_lost(self) -> None:
        """A replica lost a request: where it died, that is how it is known first, and its prefixes are
        without a home from now on. Not forgotten: it may live, and only the way to it have failed."""
        self._inheritance.replica_left(self._clock())

    def watch_membership(self, listener: Callable[[Mapping[ReplicaId, ReplicaInfo]], None]) -> None:
        """Call `listener` with the replicas after every change; it must not block."""
        self._membership_listeners.append(listener)

    def watch_load(self, listener: Callable[[], None]) -> None:
        """Call `listener` after whatever may free a replica: a report, a release, a change of membership.

        Often, and before that is acted on: it must only take note.
        """
        self._load_listeners.append(listener)

    def watch_ends(self, listener: Callable[[RequestEnded], None]) -> None:
        """Call `listener` with whatever a replica says it computes no more, of any router's; some of it more
        than once. It must not block."""
        self._end_listeners.append(listener)

    def make_copies(self, maker: CopyMaker | None) -> None:
        """From now on decisions may want a hot prefix computed on one more replica, beside their requests,
        and `maker` is told of each; None: no more. Nobody who watches requests hears of them."""
        self._copies.made_by(maker)

    def copy_failed(self, query: RouteQuery, replica_id: ReplicaId) -> None:
        """It was not made there: it is not wanted there again for a while."""
        self._copies.failed(query, replica_id)

    def watch(self, observer: RoutingObserver) -> None:
        """Tell `observer` of every decision from now on, and of what comes of it."""
        self._observers.append(observer)
        for replica_id, info in self._fleet.members.items():
            observer.replica_added(replica_id, info)

    @property
    def replicas(self) -> Mapping[ReplicaId, ReplicaInfo]:
        """The replicas that may be chosen, draining and busy ones included."""
        return self._fleet.members

    @property
    def foreign(self) -> frozenset[ReplicaId]:
        """Replicas that run with another model, or cannot be read, as in a rolling update: never chosen."""
        return self._fleet.foreign

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
            self.refused(query)
            raise

    def weigh(self, query: RouteQuery, *, earlier: Decision | None = None, ahead: Ahead = NOBODY) -> Decision:
        """Where the request should go as things are; books nothing. Raises as `choose` does.

        earlier: what was decided about the same query before, to save work. ahead: who waits before it.
        """
        return self._weighing.weigh(query, earlier=earlier, ahead=ahead)

    def book(self, decision: Decision) -> Placement:
        """Act on a decision just taken: reserve, and expect its blocks there."""
        placement = self._bookings.book(decision)
        if decision.hot_copy is not None:
            self._copies.order(decision.query, decision.hot_copy)
        return placement

    def free_replicas(self, within_s: float, within_steps: float = 0.0) -> tuple[int, list[ReplicaState]]:
        """How many replicas may be chosen, now or in time; and those that would start so soon on new work, in
        seconds or in what so many steps take there without a prompt.

        Draining ones are neither, full ones may be chosen in time. O(replicas).
        """
        return self._weighing.free_replicas(within_s, within_steps)

    def could_win(self, earlier: Decision, free: Sequence[ReplicaState], ahead: Ahead = NOBODY) -> bool:
        """Whether weighing it anew might choose one of these. O(these). ahead: as `weigh` is to have it.

        False is certain but for what time alone changes and what has become cached in the meantime: weigh
        anew now and then.
        """
        return self._weighing.could_win(earlier, free, ahead)

    def wait_s(self, held_s: float = 0.0) -> float:
        """Seconds until the fleet could start on a newcomer, when so much work held here goes before it.

        0 when none is there. O(replicas), and sorting them.
        """
        return self._weighing.wait_s(held_s)

    def share_s(self, held_s: float) -> float:
        """Of each replica's time, when so much work is held here and the other routers hold about as much."""
        return self._weighing.share_s(held_s)

    def note_held(self, num_held: int) -> None:
        """So many requests wait at this router for a replica: they count as queued."""
        self._weighing.num_held = num_held

    def note_refused(self, error: AllBusy | NoReplica) -> None:
        """A request was refused for that."""
        self._counts.refused(error)

    def refused(self, query: RouteQuery) -> None:
        """That request is over and was never booked: instead of `finish`."""
        hints = to_hints(query.block_hashes)
        for observer in self._observers:
            observer.refused(query, hints)

    def rerank(self, request_id: RequestId, candidates: Sequence[ReplicaId]) -> list[ReplicaId]:
        """Order these replicas for a request already chosen for, under the same reservation.

        For when nobody in the first ranks accepted. Excluded replicas are left out; draining and full
        ones come last, unknown ones behind them: whoever is asked may still say no. Those of another model
        are left out, too.
        """
        flight = self._bookings.get(request_id)
        if flight is None:
            unknown = PolicyRequest(request_id, RequestShape(1))
            flight = InFlight(unknown, frozenset(), self._policies.configured)
        excluded = flight.excluded | self._fleet.foreign
        return self._weighing.rerank(flight.policy, flight.request, excluded, candidates)

    def routed(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        """This replica accepted the request: the booking moves there if it is elsewhere."""
        self._bookings.routed(request_id, replica_id)

    def accepted_by(self, request_id: RequestId) -> ReplicaId | None:
        """Who accepted the request in flight, also after that replica was lost; None: nobody has yet."""
        flight = self._bookings.get(request_id)
        return flight.accepted_by if flight is not None else None

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        """That replica has computed the first token, with so much of the prompt from its cache."""
        self._bookings.first_token(request_id, replica_id, cached_tokens)

    def continued(self, request_id: RequestId) -> None:
        """Another replica has gone on with an answer that had its first token before."""
        self._bookings.continued(request_id)

    def release(self, request_id: RequestId) -> bool:
        """The attempt is over, however it ended; whether there was one. Idempotent."""
        if not self._bookings.release(request_id):
            return False
        self._tell_load()
        return True

    def finish(
        self, request_id: RequestId, *, block_hashes: Sequence[BlockHash] = (), answers: Sequence[int] = ()
    ) -> None:
        """The request is over, after all its attempts; once per request.

        block_hashes: chain of the full blocks of prompt and output, () if unknown. answers: tokens of each.
        """
        self.release(request_id)
        self._bookings.finish(request_id, block_hashes=block_hashes, answers=answers)

    # --- what replicas say (EventSink) --------------------------------------------------------

    def on_events(self, replica_id: ReplicaId, events: EventBatch) -> Digest | None:
        """Apply a batch. The digest of what is indexed then; None if unknown, or nothing is."""
        self._tell_ends(replica_id, events.load)  # first: it is no work any more
        if replica_id not in self._fleet:
            return None
        self._report(replica_id, events.load, is_between_steps=True)
        if replica_id not in self._index:
            return None
        if events.removed:
            uses = self._shaper.uses_of_blocks(events.removed)
            self._loads.evictions.evicted(replica_id, len(events.removed), uses)
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
        return self._index.digest(replica_id)

    def on_load(self, replica_id: ReplicaId, load: Load) -> None:
        """Also of a replica that has left, and goes on with what it has."""
        self._tell_ends(replica_id, load)  # first: it is no work any more
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
            in_flight=len(self._bookings),
            held=self._weighing.num_held,
            no_replica=self._counts.no_replica,
            all_busy=self._counts.all_busy,
        )

    def statistics(self) -> RoutingStatistics:
        """O(replicas + what the index expects): milliseconds while thousands of prompts are under way."""
        index, counts = self._index, self._counts
        return RoutingStatistics(
            replicas=self._replica_statistics(),
            in_flight=len(self._bookings),
            held=self._weighing.num_held,
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

    # --- small parts --------------------------------------------------------------------------

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

    def _add(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        self._loads.add_replica(replica_id, info)
        if self._fleet.add(replica_id, info):
            self._index.add_replica(replica_id, info)
        self._policies.replica_added(replica_id, info)
        self.queues.replica_added(replica_id, info)
        for observer in self._observers:
            observer.replica_added(replica_id, info)

    def _remove(self, replica_id: ReplicaId) -> None:
        self._inheritance.replica_left(self._clock())
        self._fleet.remove(replica_id)
        self._loads.remove_replica(replica_id)
        self._index.remove_replica(replica_id)
        self._late.gone(replica_id)
        self.queues.replica_removed(replica_id)
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

    def _report(self, replica_id: ReplicaId, load: Load, *, is_between_steps: bool = False) -> None:
        if load.is_draining and not self._loads[replica_id].load.is_draining:
            self._inheritance.replica_left(self._clock())
        self._loads.report(replica_id, load, is_between_steps=is_between_steps)
        self.queues.said(replica_id, load, self._clock())
        self._fleet.heard(replica_id)
        self._late.heard()
        self._tell_load()

    def _tell_ends(self, replica_id: ReplicaId, load: Load) -> None:
        for ended in load.ended:
            self._bookings.ended(ended, replica_id)
            for listener in self._end_listeners:
                listener(ended)
