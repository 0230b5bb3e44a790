"""What `GET /dashboard/data` answers: one Router's state as plain values, small enough for every second.

Bounded whatever the traffic: replicas + `MAX_RUNS` + `MAX_DECISIONS` + the slots of one span. Decisions are
told once: an answer carries a `cursor`, and the next question gives it back to hear only what has changed. A
cursor is one Router's own, so a question also says whose it is; another Router starts from the beginning.

Several Routers each answer for themselves, by name; what they would answer together can be put beside
`DashboardView` by whoever can ask all of them.

Times are seconds since this Router started (`uptime_s`): a browser's clock need not agree.
Knows routing's and its watchers' numbers; knows neither HTTP nor how a page looks. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.config import RouterConfig
from router.insight.accounting import UncachedReason
from router.insight.debug_view import RequestView
from router.insight.hot_chains import HotRun
from router.insight.insight import DASHBOARD_CANDIDATES, Insight, LiveView
from router.insight.journal import JournalEntry
from router.insight.recent_traffic import Span
from router.placement.routing import Routing
from router.placement.routing_statistics import ReplicaStatistics
from router.prefixes.prefix import PinnedPrefix

FORMAT_VERSION = 1
MAX_DECISIONS = 12  # in one answer, of those that have changed; the others are in the next ones
MAX_FOLLOWED = 40  # of the latest requests; what comes of those before them is not told any more
MAX_RUNS = 96  # of the hottest chains
MAX_PINS = 64  # held prefixes, the oldest; of the rest their number
MIN_SHARE = 0.01  # of all prompts: a run with less would be thinner than a line


class ReplicaRow(msgspec.Struct, frozen=True):
    """One replica as this Router sees it."""

    id: str
    running: int
    waiting: int  # in its queue, as it last said
    in_flight: int  # of this Router's requests there
    queued_tokens: int  # uncached prompt tokens ahead of a new request
    backlog_s: float  # of prefill ahead of a new request
    used: float  # of its KV blocks, by running sequences; 0..1
    cached: float  # of its KV blocks, with content that may be found again; 0..1
    blocks: int
    slots: int  # sequences it runs at once
    is_matched: bool  # False: its cache is unknown here, it is routed by load alone
    is_silent: bool  # nothing heard for too long
    is_draining: bool


class FleetView(msgspec.Struct, frozen=True):
    replicas: list[ReplicaRow]
    held: int  # requests that wait at this Router
    in_flight: int  # of this Router
    refused_no_replica: int  # since the start
    refused_busy: int


class TrafficSums(msgspec.Struct, frozen=True):
    """Of the whole span."""

    requests: int
    p50_s: float | None
    p99_s: float | None
    prompt: int
    available: int  # tokens cached anywhere in the fleet
    delivered: int
    uncached: dict[str, int]  # by reason; sums to prompt - delivered


class TrafficView(msgspec.Struct, frozen=True):
    """First tokens of the span asked for. Columns of equal length, one item per step, oldest first."""

    step_s: float
    num_steps: int  # that the span has once it is full
    end_s: float  # of the last step, which is not over yet
    requests: list[int]
    p50_s: list[float | None]  # time to first token
    p99_s: list[float | None]
    prompt: list[int]  # tokens
    delivered: list[int]  # of those, from caches
    sums: TrafficSums


class RunRow(msgspec.Struct, frozen=True):
    """A stretch of one or more hot chains. Its name is keyed per Router process."""

    name: str
    parent: int | None  # index of the run it goes on from
    start: int  # tokens [start, end) of a prompt
    end: int
    share: float  # of prompts
    per_minute: float
    hit: float | None  # of its tokens asked for, those from a cache
    holders: int  # replicas that held it when it was last asked for


class DecisionRow(msgspec.Struct, frozen=True):
    """One request with its decision, and what came of it so far."""

    number: int  # in the order requests first wanted a replica
    asked_s: float
    request: RequestView


class PinRow(msgspec.Struct, frozen=True):
    """A held prefix, whichever Router it came through. Its name is drawn at random and says nothing of it."""

    name: str
    tokens: int  # of one copy
    copies: int  # wanted
    replicas: Sequence[str]  # that hold one now
    left_s: float


class DashboardView(msgspec.Struct, frozen=True):
    """The whole answer."""

    version: int
    router: str  # names this Router process among several
    cursor: int
    uptime_s: float
    model: str
    policy: str
    block_size: int
    fleet: FleetView
    traffic: TrafficView
    chains: list[RunRow]  # parents before children
    pins: list[PinRow]  # oldest first
    num_pins: int  # those that are not listed included
    decisions: list[DecisionRow]  # changed since the cursor, newest first


class Dashboard:
    """Puts the answers together. O(replicas + what is shown)."""

    def __init__(
        self,
        config: RouterConfig,
        routing: Routing,
        insight: Insight,
        live: LiveView,
        *,
        pins: Callable[[], Sequence[PinnedPrefix]],
        wall_clock: Callable[[], float],
    ) -> None:
        """pins: every held prefix. wall_clock: unix seconds, as those end by."""
        self._pins = pins
        self._wall_clock = wall_clock
        self._config = config
        self._routing = routing
        self._insight = insight
        self._live = live
        self._block_size = config.fingerprint.block_size

    def view(self, *, span: int = 0, router: str | None = None, cursor: int = 0) -> DashboardView:
        """span: index into `recent_traffic.SPANS`; router, cursor: of the last answer, if there was one."""
        insight, config = self._insight, self._config
        told, cursor = self._changed(cursor if router == insight.name else 0)
        pins = self._pins()
        return DashboardView(
            version=FORMAT_VERSION,
            router=insight.name,
            cursor=cursor,
            uptime_s=insight.uptime_s,
            model=config.model_name,
            policy=config.policy,
            block_size=self._block_size,
            fleet=self._fleet(),
            traffic=_traffic(self._live.traffic.span(span)),
            chains=[self._run(run) for run in self._live.chains.hottest(MAX_RUNS, min_share=MIN_SHARE)],
            pins=[self._pin(pin) for pin in pins[:MAX_PINS]],
            num_pins=len(pins),
            decisions=[
                DecisionRow(
                    entry.number,
                    insight.since_start(entry.asked_at),
                    insight.view(entry, DASHBOARD_CANDIDATES),
                )
                for entry in told
            ],
        )

    def _changed(self, since: int) -> tuple[list[JournalEntry], int]:
        """What to tell, newest first, and the cursor behind it.

        Whoever has just come gets the latest; whoever follows, what was heard first, and the rest by its next
        questions: what is passed over once is never told, and a request that is over would look as if it ran.
        """
        journal = self._live.journal
        changed = journal.changed_since(since, MAX_FOLLOWED)
        if not since or len(changed) <= MAX_DECISIONS:
            return changed[:MAX_DECISIONS], journal.revision
        last = sorted([entry.revision for entry in changed])[MAX_DECISIONS - 1]
        return [entry for entry in changed if entry.revision <= last], last

    def _fleet(self) -> FleetView:
        numbers = self._routing.fleet_statistics()
        return FleetView(
            replicas=[self._replica(replica) for replica in numbers.replicas],
            held=numbers.held,
            in_flight=numbers.in_flight,
            refused_no_replica=numbers.no_replica,
            refused_busy=numbers.all_busy,
        )

    def _replica(self, replica: ReplicaStatistics) -> ReplicaRow:
        info = self._routing.replicas[replica.replica_id]
        return ReplicaRow(
            id=replica.replica_id,
            running=replica.num_running,
            waiting=replica.num_waiting,
            in_flight=replica.in_flight,
            queued_tokens=replica.queued_tokens,
            backlog_s=round(replica.backlog_s, 4),
            used=round(replica.used_fraction, 4),
            cached=round(min(1.0, replica.num_blocks / info.num_blocks), 4) if info.num_blocks else 0.0,
            blocks=info.num_blocks,
            slots=info.max_running,
            is_matched=replica.is_matched,
            is_silent=replica.is_silent,
            is_draining=replica.is_draining,
        )

    def _pin(self, pin: PinnedPrefix) -> PinRow:
        return PinRow(
            name=pin.pin_id,
            tokens=pin.num_blocks * self._block_size,
            copies=pin.copies,
            replicas=tuple(pin.replicas),
            left_s=round(max(0.0, pin.expires_at - self._wall_clock()), 1),
        )

    def _run(self, run: HotRun) -> RunRow:
        return RunRow(
            name=run.name,
            parent=run.parent,
            start=run.start * self._block_size,
            end=run.end * self._block_size,
            share=round(run.share, 5),
            per_minute=round(run.per_minute, 2),
            hit=round(run.hit_ratio, 4) if run.hit_ratio is not None else None,
            holders=run.num_holders,
        )


def _traffic(span: Span) -> TrafficView:
    points, total = span.points, span.total
    p50_s, p99_s = total.quantiles(0.5, 0.99)
    return TrafficView(
        step_s=span.step_s,
        num_steps=span.num_slots,
        end_s=span.since_start_s,
        requests=[point.requests for point in points],
        p50_s=[_short(point.p50_s) for point in points],
        p99_s=[_short(point.p99_s) for point in points],
        prompt=[point.prompt for point in points],
        delivered=[point.delivered for point in points],
        sums=TrafficSums(
            requests=total.requests,
            p50_s=_short(p50_s),
            p99_s=_short(p99_s),
            prompt=total.prompt,
            available=total.available,
            delivered=total.delivered,
            uncached={reason.value: total.uncached[reason] for reason in UncachedReason},
        ),
    )


def _short(seconds: float | None) -> float | None:
    """Digits that are right: a percentile is known to within a twentieth."""
    return None if seconds is None else float(f"{seconds:.3g}")
