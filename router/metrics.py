"""The Router's metrics: names, units and labels of requests, decisions, replicas and events.

What watches decisions (`insight/insight_metrics.py`) and parts with counters of their own (`*_metrics.py`
beside them, `tenants/tenancy.py`) name their series themselves, under the same rules. All are of one Router
process; `fleet/` puts those of several together, by their label `router`. Labels take few, known values: no
request, tenant or prompt ever becomes one. Gauges read their source when scraped, so a replica that left has
no series left behind. docs/metrics.md lists every name; a test compares.
Knows Prometheus; knows neither HTTP nor where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from cache.engine_report import Tally
from router.events.event_lag import LAG_BUCKETS_S
from router.events.event_stream import ResyncReason
from router.events.subscriber import EventStatistics
from router.index.hash_trie import MAX_BLOCKS
from router.placement.admission import QueueState
from router.placement.decision import RouteReason
from router.placement.routing_statistics import ReplicaStatistics, RoutingStatistics
from router.prompts.chain_cache import ChainStatistics
from router.prompts.segment_cache import CacheStatistics
from router.scraped import Scraped, buckets, counters, histogram

_DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)


class RouterMetrics:
    """Declares every metric in a registry of its own: two Routers in one process do not meet."""

    def __init__(
        self, endpoints: Sequence[str], outcomes: Sequence[str], policies: Sequence[str] = ()
    ) -> None:
        """policies: those whose decisions are shown before the first one is taken."""
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "warmpath_requests",
            "Requests answered, by how they ended.",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "warmpath_requests_in_flight", "Generations routed and not yet ended.", registry=registry
        )
        self.without_token = Gauge(
            "warmpath_requests_without_token",
            "Of those in flight, who waits for a first token.",
            registry=registry,
        )
        self.first_token_s = Histogram(
            "warmpath_time_to_first_token_seconds",
            "From the checked body to the first token.",
            ("endpoint",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.request_s = Histogram(
            "warmpath_request_seconds",
            "From the request's arrival to the end of its answer.",
            ("endpoint",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.decisions = Counter(
            "warmpath_decisions",
            "Routing decisions, by policy and by the reason it gave.",
            ("policy", "reason"),
            registry=registry,
        )
        self.decision_s = {part: Tally(_DECISION_BUCKETS_S) for part in DecisionPart}
        registry.register(_DecisionCollector(lambda: self.decision_s))
        self.held_s = Histogram(
            "warmpath_held_seconds",
            "Waiting at the router for a replica that is nearly free; only where requests are bound late.",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.completion_tokens = Counter("warmpath_completion_tokens", "Tokens generated.", registry=registry)
        self.retries = Counter(
            "warmpath_retries",
            "Attempts after the first, by cause, and by whether the client had tokens already.",
            ("why", "phase"),
            registry=registry,
        )
        for why in RETRY_CAUSES:
            for phase in RETRY_PHASES:
                self.retries.labels(why, phase)
        self.continuations = Counter(
            "warmpath_continuations",
            "Streams that went on elsewhere after their replica was lost, once they had a token there.",
            registry=registry,
        )
        self.continued_tokens = Counter(
            "warmpath_continued_tokens",
            "Tokens that continuations began from, by whether the other replica had them cached.",
            ("source",),
            registry=registry,
        )
        for source in ("cached", "computed"):
            self.continued_tokens.labels(source)
        self.unknown_fields = Counter(
            "warmpath_unknown_fields",
            "Body fields accepted that this server does not know.",
            registry=registry,
        )

        # A series that appears with its first sample cannot be alerted on.
        for endpoint in endpoints:
            for outcome in outcomes:
                self.requests.labels(endpoint, outcome)
        for policy in policies:
            for reason in RouteReason:
                self.decisions.labels(policy, reason.value)

    def watch_routing(self, read: Callable[[], RoutingStatistics]) -> None:
        """Adds metrics that call `read` at every scrape. Call once."""
        self.registry.register(_RoutingCollector(read))

    def watch_queue(self, read: Callable[[], QueueState]) -> None:
        """Adds metrics that call `read` at every scrape. Call once."""
        self.registry.register(_QueueCollector(read))

    def watch_tokenization(
        self, read: Callable[[], CacheStatistics | None], num_pending: Callable[[], int]
    ) -> None:
        """Adds metrics that call both at every scrape; None = prompts are tokenized whole. Call once."""
        self.registry.register(_TokenizationCollector(read))
        Gauge(
            "warmpath_tokenization_pending",
            "Long prompts and large bodies that wait for a thread, or are on one.",
            registry=self.registry,
        ).set_function(num_pending)

    def watch_bodies(self, held_bytes: Callable[[], int]) -> None:
        """Adds a metric that calls it at every scrape. Call once."""
        Gauge(
            "warmpath_bodies_held_bytes",
            "Bodies that are here and not yet placed; large ones are refused beyond max_bodies_bytes.",
            registry=self.registry,
        ).set_function(held_bytes)

    def watch_hashing(self, read: Callable[[], ChainStatistics]) -> None:
        """Adds metrics that call `read` at every scrape. Call once."""
        self.registry.register(_HashingCollector(read))

    def watch_events(self, read: Callable[[], EventStatistics]) -> None:
        """Adds metrics that call `read` at every scrape. Call once."""
        self.registry.register(_EventCollector(read))


class DecisionPart(Enum):
    """Where the time of placing one request goes, in order."""

    TOKENIZE = "tokenize"  # a text or chat to token ids, waiting for a thread included
    HASH = "hash"  # the prompt's blocks
    MATCH = "match"  # what each replica holds of it
    RANK = "rank"  # what it would cost where
    BOOK = "book"  # reserve, and expect its blocks there


RETRY_CAUSES = ("replica_lost", "busy", "forward_failed", "admission_failed", "handed_over", "deltas_lost")
RETRY_PHASES = ("before_first_token", "mid_stream")


class _DecisionCollector(Scraped[Mapping[DecisionPart, Tally]]):
    """Counted in tallies, not in a `Histogram`, whose locks would add a sixth to a short decision."""

    def families(self, numbers: Mapping[DecisionPart, Tally]) -> Iterable[Metric]:
        family = HistogramMetricFamily(
            "warmpath_decision_seconds",
            "Time of each part of a routing decision; of one bound late, match and rank come several times.",
            labels=("part",),
        )
        for part, tally in numbers.items():
            told = tally.distribution()
            family.add_metric((part.value,), buckets(_DECISION_BUCKETS_S, told.counts), told.total)
        yield family


class _QueueCollector(Scraped[QueueState]):
    """Reads what waits, and may, at scrape time."""

    def families(self, numbers: QueueState) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "warmpath_queue_wait_seconds",
            "Until a replica could start on a new request, behind all that wait; 0 = at once.",
            numbers.wait_s,
        )
        yield GaugeMetricFamily(
            "warmpath_queue_wait_limit_seconds",
            "A new request that would wait longer is refused, now; infinite = none is.",
            numbers.bound_s,
        )
        yield GaugeMetricFamily(
            "warmpath_overload",
            "1 = more kept coming than was served, so the limit is the strict one.",
            numbers.is_overload,
        )


class _TokenizationCollector(Scraped[CacheStatistics | None]):
    """Reads the segment cache at scrape time."""

    def families(self, numbers: CacheStatistics | None) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "warmpath_tokenization_by_segment",
            "1 while prompts are tokenized by segment and segments are kept; 0 = whole, every time.",
            int(numbers is not None),
        )
        if numbers is None:
            return
        yield GaugeMetricFamily(
            "warmpath_tokenization_cache_bytes", "Memory of kept segments, bytes.", numbers.num_bytes
        )
        yield GaugeMetricFamily("warmpath_tokenization_cache_segments", "Segments kept.", numbers.num_entries)
        yield CounterMetricFamily(
            "warmpath_tokenization_evictions", "Segments dropped for want of room.", numbers.evicted_entries
        )
        yield counters(
            "warmpath_tokenization_tokens",
            "Tokens of texts and chats, by whether their segment was kept or had to be tokenized.",
            "source",
            {"kept": numbers.reused_tokens, "tokenized": numbers.tokenized_tokens},
        )


class _HashingCollector(Scraped[ChainStatistics]):
    """Reads the cache of prompts' hashes at scrape time."""

    def families(self, numbers: ChainStatistics) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "warmpath_hash_cache_bytes", "Memory of kept hashes, bytes.", numbers.num_bytes
        )
        yield GaugeMetricFamily("warmpath_hash_cache_runs", "Runs of blocks kept.", numbers.num_runs)
        yield CounterMetricFamily(
            "warmpath_hash_cache_evictions", "Runs dropped for want of room.", numbers.evicted_runs
        )
        yield counters(
            "warmpath_hashed_blocks",
            "Full blocks of prompts, by whether their hash was kept or had to be computed.",
            "source",
            {"kept": numbers.reused_blocks, "computed": numbers.hashed_blocks},
        )


class _EventCollector(Scraped[EventStatistics]):
    """Reads what became of KV events at scrape time."""

    def families(self, statistics: EventStatistics) -> Iterable[Metric]:
        numbers = statistics.counters
        for name, text, value in (
            ("applied", "KV event batches applied.", numbers.applied),
            ("repeated", "KV events ignored: older than what was known.", numbers.repeated),
            ("lost", "KV event batches missing in gaps, as far as that can be told.", numbers.lost),
        ):
            yield CounterMetricFamily(f"warmpath_event_batches_{name}", text, value)
        yield counters(
            "warmpath_event_snapshots",
            "Snapshots applied, by why they were wanted; drift = a repair found necessary by the digest.",
            "reason",
            {reason.value: numbers.snapshots[reason] for reason in ResyncReason},
        )
        yield self._lag(statistics)
        lag = GaugeMetricFamily(
            "warmpath_replica_event_lag_seconds", "Lag of its latest batch.", labels=("replica",)
        )
        for replica_id, lag_s in statistics.lag_s.items():
            lag.add_metric((replica_id,), lag_s)
        yield lag

    @staticmethod
    def _lag(statistics: EventStatistics) -> Metric:
        lag = statistics.counters.lag
        return histogram(
            "warmpath_event_lag_seconds",
            "From a batch's publication to its application, above the least delay seen.",
            LAG_BUCKETS_S,
            lag.counts,
            lag.sum_s,
        )


class _RoutingCollector(Scraped[RoutingStatistics]):
    """Reads the routing core at scrape time, so that what left it leaves the metrics too."""

    def families(self, numbers: RoutingStatistics) -> Iterable[Metric]:
        yield GaugeMetricFamily("warmpath_index_entries", "Block hashes known.", numbers.index_entries)
        yield GaugeMetricFamily("warmpath_index_max_entries", "Block hashes there is room for.", MAX_BLOCKS)
        yield GaugeMetricFamily("warmpath_index_bytes", "Memory of the index, bytes.", numbers.index_bytes)
        yield GaugeMetricFamily(
            "warmpath_index_refused_blocks",
            "Blocks that replicas hold and the index has no room for.",
            numbers.index_refused,
        )
        yield GaugeMetricFamily("warmpath_replicas", "Replicas that may be chosen.", len(numbers.replicas))
        yield GaugeMetricFamily(
            "warmpath_held_requests", "Requests that wait at the router for a replica.", numbers.held
        )
        yield counters(
            "warmpath_rejections",
            "Attempts that no replica could be found for: all were full, or none was there.",
            "reason",
            {"all_busy": numbers.all_busy, "no_replica": numbers.no_replica},
        )
        yield CounterMetricFamily(
            "warmpath_degraded_decisions", "Decisions with some cache unknown.", numbers.degraded
        )
        yield CounterMetricFamily(
            "warmpath_expired_reservations", "Reservations nobody released.", numbers.expired_reservations
        )
        yield CounterMetricFamily(
            "warmpath_malformed_events", "KV events that could not be read.", numbers.malformed_events
        )
        yield counters(
            "warmpath_event_resyncs",
            "Snapshots wanted, by reason; gap = a batch was lost.",
            "reason",
            {reason.value: numbers.resyncs.get(reason, 0) for reason in ResyncReason},
        )
        yield from self._per_replica(numbers)

    def _per_replica(self, numbers: RoutingStatistics) -> Iterable[Metric]:
        columns: tuple[tuple[str, str, Callable[[ReplicaStatistics], float]], ...] = (
            ("in_flight", "Requests of this Router there.", lambda replica: replica.in_flight),
            ("unseen", "Of those, not yet named by its engine.", lambda replica: replica.unseen),
            ("running", "Requests in its steps, as it last said.", lambda replica: replica.num_running),
            ("waiting", "Requests in its queue, as it last said.", lambda replica: replica.num_waiting),
            (
                "queued_tokens",
                "Uncached prompt tokens in its queue, or sent and not yet seen.",
                lambda replica: replica.queued_tokens,
            ),
            ("backlog_seconds", "Prefill ahead of a new request.", lambda replica: replica.backlog_s),
            (
                "used_ratio",
                "Share of its blocks, but held ones, taken by running requests and by what was sent.",
                lambda replica: replica.used_fraction,
            ),
            (
                "known_blocks",
                "Blocks it holds, by its events, or by what was sent there if it tells none.",
                lambda replica: replica.num_blocks,
            ),
            (
                "matched",
                "1 = its hashes are this Router's; 0 = load alone.",
                lambda replica: replica.is_matched,
            ),
            ("silent", "1 = nothing was heard of it for a while.", lambda replica: replica.is_silent),
            ("draining", "1 = it takes no new requests.", lambda replica: replica.is_draining),
        )
        for name, text, value in columns:
            family = GaugeMetricFamily(f"warmpath_replica_{name}", text, labels=("replica",))
            for replica in numbers.replicas:
                family.add_metric((replica.replica_id,), value(replica))
            yield family
