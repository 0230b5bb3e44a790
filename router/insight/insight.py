"""Everything that watches one Router's decisions, put together: who watches, who tells whom, what is shown.

    Accounting ──account──> ClosedLoop ──doubt──> a snapshot of that replica
        │                                  (always)
        ├──account──> Journal <──verdict── Shadow      TrafficRecorder
        │             (expose_debug,       (shadow_policy)   (record)
        │              dashboard)
        └──account──> RecentTraffic        HotChains
                      (dashboard)          (dashboard)

Knows every watcher; knows neither HTTP, words nor sockets. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cache.types import ReplicaId
from router.config import RouterConfig
from router.insight.accounting import Accounting, AccountingTotals
from router.insight.closed_loop import ClosedLoop, LoopTotals
from router.insight.debug_view import (
    FORMAT_VERSION,
    MAX_CANDIDATES,
    DebugPage,
    RequestView,
    SummaryView,
    loop_view,
    recording_view,
    request_view,
    shadow_totals_view,
    totals_view,
)
from router.insight.hot_chains import HotChains
from router.insight.journal import Journal, JournalEntry
from router.insight.recent_traffic import RecentTraffic
from router.insight.recording import RecordingTotals, TrafficRecorder
from router.insight.shadow import Shadow, ShadowTotals
from router.placement.observer import SilentObserver
from router.placement.routing import Routing
from router.policies import PolicyContext, make_policy
from router.policies.expected_time import ExpectedTime, ExpectedTimeOptions
from router.pricing.cost import MEMORY_PRESSURE_S

DASHBOARD_REQUESTS = 64  # the journal keeps for the live page alone
DASHBOARD_CANDIDATES = 4  # of one decision, which that page shows


@dataclass(frozen=True, slots=True)
class InsightTotals:
    """Every watcher's sums, for metrics. Live objects: read them at once."""

    accounting: AccountingTotals
    accounting_bytes: int  # its memories, at most
    loop: LoopTotals
    recent_share_within_one: float
    shadow: ShadowTotals | None
    recording: RecordingTotals | None


@dataclass(frozen=True, slots=True)
class LiveView:
    """Who watches for the live page."""

    journal: Journal
    traffic: RecentTraffic
    chains: HotChains


class Insight:
    """Watches `routing` from its making on. `aclose` once done; it writes what a recording still holds."""

    def __init__(
        self,
        config: RouterConfig,
        routing: Routing,
        *,
        doubt: Callable[[ReplicaId], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """doubt: asks for a snapshot of that replica. Raises ConfigError for a recording's folder."""
        self.name = secrets.token_hex(4)  # of this Router among several, in what is shown
        self._config = config
        self._routing = routing
        self._clock = clock
        self._started_at = clock()
        self._block_size = config.fingerprint.block_size
        self._memory_pressure_s = _memory_pressure_s(config)
        self._accounting = Accounting(self._block_size)
        self._loop = ClosedLoop(self._block_size, clock=clock, doubt=doubt)
        self._accounting.listen(self._loop.heard)
        self._journal = self._make_journal()
        self._shadow = self._make_shadow()
        self._recorder = self._make_recorder(wall_clock)
        self.live = self._make_live()
        # The journal first: a shadow's verdict is written into its entry.
        for watcher in (self._journal, self._shadow, self._accounting, _Leaving(self._loop), self._recorder):
            if watcher is not None:
                routing.watch(watcher)
        if self.live is not None:
            routing.watch(self.live.traffic)
            routing.watch(self.live.chains)

    @property
    def num_routers(self) -> int:
        """Routers of the same replicas, this one included."""
        return self._routing.peers()[1]

    @property
    def uptime_s(self) -> float:
        """Seconds since this Router started: what times in its views count from."""
        return self._clock() - self._started_at

    def since_start(self, moment: float) -> float:
        """A moment of the clock, as `uptime_s` was then."""
        return moment - self._started_at

    def view(self, entry: JournalEntry, max_candidates: int) -> RequestView:
        """One remembered request as `/debug/route` shows it."""
        return request_view(
            entry,
            block_size=self._block_size,
            memory_pressure_s=self._memory_pressure_s,
            max_candidates=max_candidates,
        )

    def totals(self) -> InsightTotals:
        """O(1)."""
        return InsightTotals(
            self._accounting.totals,
            self._accounting.num_bytes,
            self._loop.totals,
            self._loop.share_within_one,
            self._shadow.totals if self._shadow is not None else None,
            self._recorder.totals if self._recorder is not None else None,
        )

    def find(self, request_id: str) -> DebugPage | None:
        """The page of one request; None if it is not remembered here."""
        entry = self._journal.find(request_id) if self._journal is not None else None
        return self._page([entry], MAX_CANDIDATES) if entry is not None else None

    def latest(self, count: int) -> DebugPage:
        """The page of the latest requests, each with the replica that was chosen. O(count)."""
        return self._page(self._journal.latest(count) if self._journal is not None else [], 1)

    async def aclose(self) -> None:
        """Idempotent."""
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    def _page(self, entries: list[JournalEntry], max_candidates: int) -> DebugPage:
        views = [self.view(entry, max_candidates) for entry in entries]
        return DebugPage(FORMAT_VERSION, self._summary(), views)

    def _summary(self) -> SummaryView:
        replicas = self._routing.replicas.values()
        totals = self.totals()
        return SummaryView(
            router=self.name,
            num_routers=self.num_routers,
            uptime_s=self.uptime_s,
            model=self._config.model_name,
            policy=self._config.policy,
            block_size=self._block_size,
            num_replicas=len(replicas),
            cache_tokens=sum(info.num_blocks * info.fingerprint.block_size for info in replicas),
            totals=totals_view(totals.accounting),
            loop=loop_view(totals.loop, totals.recent_share_within_one),
            shadow=shadow_totals_view(totals.shadow) if totals.shadow is not None else None,
            recording=recording_view(totals.recording) if totals.recording is not None else None,
        )

    def _make_journal(self) -> Journal | None:
        config = self._config
        if not (config.expose_debug or config.dashboard):
            return None
        if config.expose_debug:
            journal = Journal(config.debug_requests, max_candidates=MAX_CANDIDATES, clock=self._clock)
        else:
            journal = Journal(DASHBOARD_REQUESTS, max_candidates=DASHBOARD_CANDIDATES, clock=self._clock)
        self._accounting.listen(journal.accounted)
        return journal

    def _make_live(self) -> LiveView | None:
        if not self._config.dashboard:
            return None
        assert self._journal is not None
        traffic = RecentTraffic(clock=self._clock)
        self._accounting.listen(traffic.accounted)
        return LiveView(self._journal, traffic, HotChains(self._block_size, clock=self._clock))

    def _make_shadow(self) -> Shadow | None:
        config = self._config
        if config.shadow_policy is None:
            return None
        rng = random.Random(config.seed)  # of its own: live draws stay what they are without it
        context = PolicyContext(self._block_size, self._clock, rng, self._routing.peers)
        policy = make_policy(config.shadow_policy, config.shadow_policy_options, context=context)
        shadow = Shadow(policy, share=config.shadow_share, rng=rng, memory_pressure_s=self._memory_pressure_s)
        if self._journal is not None:
            shadow.listen(self._journal.shadowed)
        return shadow

    def _make_recorder(self, wall_clock: Callable[[], float]) -> TrafficRecorder | None:
        if self._config.record is None:
            return None
        recorder = TrafficRecorder(
            self._config.record,
            block_size=self._block_size,
            model_name=self._config.model_name,
            clock=self._clock,
            wall_clock=wall_clock,
        )
        recorder.start()
        return recorder


class _Leaving(SilentObserver):
    """Tells the closed loop who is gone, so that it remembers nothing of them."""

    def __init__(self, loop: ClosedLoop) -> None:
        self._loop = loop

    def replica_removed(self, replica_id: ReplicaId) -> None:
        self._loop.replica_removed(replica_id)


def _memory_pressure_s(config: RouterConfig) -> float:
    """The live cost model's, where it is the live policy's model at all."""
    if config.policy != ExpectedTime.name:
        return MEMORY_PRESSURE_S
    return ExpectedTimeOptions(**config.policy_options).memory_pressure_s  # type: ignore[arg-type]
