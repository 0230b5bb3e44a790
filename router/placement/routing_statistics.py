"""What a router counts, and what it says of itself and of its replicas: for metrics, /health and the page.

Knows loads, the index and counters; decides nothing. Owner: the router's event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cache.types import ReplicaId
from router.errors import AllBusy, NoReplica
from router.events.event_stream import ResyncReason
from router.index.prefix_index import PrefixIndex
from router.placement.decision import RouteReason
from router.pricing.fleet_load import FleetLoad


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica as this router sees it."""

    replica_id: ReplicaId
    is_matched: bool  # it carries this router's fingerprint
    is_silent: bool
    is_draining: bool
    in_flight: int  # of this router
    unseen: int  # of those, not yet named by the engine
    backlog_s: float
    num_running: int
    num_waiting: int
    queued_tokens: int  # uncached prompt tokens in its queue, or sent and not yet seen
    used_fraction: float  # of its blocks, by running sequences and by what was sent; 0..1
    num_blocks: int  # it holds: by its events, or by what was sent there if it tells none


@dataclass(frozen=True, slots=True)
class FleetStatistics:
    """The part of `RoutingStatistics` that can be asked for every second, whatever is in the index."""

    replicas: tuple[ReplicaStatistics, ...]
    in_flight: int
    held: int  # requests that wait at this router
    no_replica: int  # requests refused, since the start
    all_busy: int


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """A snapshot for metrics, /health and tests. Counters count from the start of the process."""

    replicas: tuple[ReplicaStatistics, ...]
    in_flight: int
    held: int  # requests that wait at this router for a replica
    index_entries: int
    index_bytes: int
    index_refused: int  # blocks that replicas hold and the index has no room for
    decisions: Mapping[RouteReason, int]
    resyncs: Mapping[ResyncReason, int]  # snapshots wanted, by reason; GAP counts lost batches
    no_replica: int  # requests refused
    all_busy: int  # requests refused
    degraded: int  # decisions in which some replica's cache was unknown
    expired_reservations: int
    malformed_events: int


@dataclass(slots=True)
class RoutingCounts:
    """What has happened since the start."""

    decisions: Counter[RouteReason] = field(default_factory=Counter)
    resyncs: Counter[ResyncReason] = field(default_factory=Counter)
    no_replica: int = 0
    all_busy: int = 0
    degraded: int = 0  # decisions with somebody's cache unknown
    expired: int = 0  # reservations
    malformed: int = 0  # events

    def refused(self, error: AllBusy | NoReplica) -> None:
        if isinstance(error, NoReplica):
            self.no_replica += 1
        else:
            self.all_busy += 1


def replica_statistics(replica_id: ReplicaId, loads: FleetLoad, index: PrefixIndex) -> ReplicaStatistics:
    """Of one that `loads` knows."""
    view, load = loads.view(replica_id), loads[replica_id]
    return ReplicaStatistics(
        replica_id=replica_id,
        is_matched=replica_id in index,
        is_silent=view.is_silent,
        is_draining=view.is_draining,
        in_flight=load.num_in_flight,
        unseen=load.num_unseen,
        backlog_s=view.backlog_s,
        num_running=load.load.num_running,
        num_waiting=load.load.num_waiting,
        queued_tokens=view.queued_tokens,
        used_fraction=view.used_fraction,
        num_blocks=index.num_blocks(replica_id),
    )
