"""One Router's parts, put together: everything between the HTTP surface and the calls to replicas.

Knows every Ray-free part of this package; knows nothing of Ray, which stays in `ingress.py` and what that is
given. Tests and simulations assemble the same parts around other calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cache.block_hash import BlockHasher
from cache.counted import counted
from cache.tracing import NoTracing, Tracing
from cache.types import ReplicaId
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.replica_calls import ReplicaCalls
from router.events.subscriber import SubscriberGroup
from router.fleet.engine_series import EngineView
from router.fleet.gather import FleetMetrics
from router.insight.insight import Insight
from router.insight.insight_metrics import InsightCollector
from router.insight.timed_routing import TimedRouting
from router.metrics import DecisionPart, RouterMetrics
from router.openai_api.about import Readiness
from router.openai_api.errors import OUTCOMES
from router.openai_api.fields import Endpoint
from router.openai_api.service import Service
from router.openai_api.structure_metrics import StructureCollector
from router.policies.base import alone
from router.prefixes.copies import Copies, PinCalls
from router.prefixes.directory import PrefixDirectory
from router.prefixes.hot_copies import HotCopies
from router.prefixes.hot_copy_metrics import HotCopyCollector
from router.prefixes.keeper import PrefixKeeper
from router.prefixes.prefix import Turn
from router.prefixes.prefix_metrics import PrefixCollector
from router.prefixes.succession import Succession
from router.prompts.prompt import PromptEncoder
from router.tenants.allowance import Visit
from router.tenants.tenancy import GateCollector, Tenancy

# Of replicas that are there when a Router starts, Serve tells it in milliseconds, on a busy machine in more.
FIRST_NEWS_S = 5.0
# A snapshot of a million blocks is here in seconds. Of whom there is none by then, there hardly will be: a
# port that Routers cannot reach would keep one that serves the others out of service for good.
SNAPSHOT_LIMIT_S = 30.0

logger = logging.getLogger(__name__)


class Calls(ReplicaCalls, PinCalls, Protocol):
    """Everything a Router asks of replicas."""


class RouterParts:
    """Routing, its event subscribers, metrics and the service. Build on the event loop; `aclose` once."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        calls: Calls,
        encoder: PromptEncoder,
        version: str,
        peers: Callable[[], tuple[int, int]] = alone,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        tracing: Tracing | None = None,
    ) -> None:
        """peers: this Router's place among the Routers of the same replicas, and their number."""
        rng = random.Random(config.seed)
        hasher = BlockHasher(config.fingerprint)
        self.config = config
        self.metrics = RouterMetrics([endpoint.value for endpoint in Endpoint], OUTCOMES, [config.policy])
        parts = self.metrics.decision_s
        self.routing = TimedRouting(
            config,
            clock=clock,
            rng=rng,
            peers=peers,
            match=parts[DecisionPart.MATCH].add,
            rank=parts[DecisionPart.RANK].add,
            book=parts[DecisionPart.BOOK].add,
        )
        self.insight = Insight(  # before anything that must be closed: its recording may be refused
            config, self.routing, doubt=self._doubt, clock=clock, wall_clock=wall_clock
        )
        self.metrics.registry.register(InsightCollector(self.insight.totals))
        self.tenancy = Tenancy(config.tenants, peers=peers, clock=clock)
        if self.tenancy.gate is not None:
            self.metrics.registry.register(GateCollector(self.tenancy.gate.statistics))
        self.subscribers = SubscriberGroup(self.routing)
        self.routing.watch_membership(self.subscribers.update)
        self.metrics.watch_routing(self.routing.statistics)
        self.metrics.watch_events(self.subscribers.statistics)
        self.metrics.watch_tokenization(encoder.statistics, lambda: encoder.num_pending)
        self.fleet = FleetMetrics(
            self.insight.name,
            model_name=config.model_name,
            own=self.metrics.registry.collect,
            engines=self._engines,
            clock=clock,
        )
        self._tracing = tracing or NoTracing()
        self.dispatcher = Dispatcher(config, self.routing, calls, hasher, self.metrics, clock, self._tracing)
        self.hot_copies = HotCopies(
            self.routing, calls, self.dispatcher.work_told, self.dispatcher.placer.served
        )
        self.metrics.registry.register(HotCopyCollector(self.hot_copies.statistics))
        copies = Copies(self.routing, self.dispatcher, calls)
        self.metrics.watch_queue(self.dispatcher.placer.queue_state)
        self.prefixes = PrefixKeeper(
            self.routing,
            copies,
            self._engines,
            name=self.insight.name,
            turn_of=self._turn_of,
            clock=clock,
            wall_clock=wall_clock,
            timeout_s=config.request_timeout_s,
            max_seconds=config.limits.max_prefix_seconds,
        )
        self.directory = PrefixDirectory(self.prefixes)
        self.metrics.registry.register(PrefixCollector(self.prefixes.statistics))
        self.service = Service(
            config,
            encoder=encoder,
            hasher=hasher,
            routing=self.routing,
            dispatcher=self.dispatcher,
            insight=self.insight,
            metrics=self.metrics,
            fleet=self.fleet,
            tracing=self._tracing,
            tenancy=self.tenancy,
            prefixes=self.prefixes,
            directory=self.directory,
            readiness=self.readiness,
            version=version,
            clock=clock,
            wall_clock=wall_clock,
            rng=rng,
        )
        self.succession = Succession(
            self.prefixes, copies, self.fleet.hear_all, self.service.prefixes.hashes, clock
        )
        self.routing.watch_membership(self.succession.watch)
        self.metrics.watch_hashing(self.service.hashing)
        self.metrics.registry.register(StructureCollector(self.service.forms.statistics))
        self._encoder = encoder
        self._was_synced = False
        self._missed_since_s: float | None = None  # when a replica's snapshot was first missed
        self._clock = clock

    def readiness(self) -> Readiness:
        """Ready once every replica known at that moment had its snapshot in, or those that had not have been
        missed for `SNAPSHOT_LIMIT_S`; and while there is one.

        A replica that joins later, or resyncs after a gap, is routed by load for that moment; taking the
        whole Router out of service for it would be the worse answer.
        """
        replicas = self.routing.replicas
        if not replicas:
            return Readiness("no replica is known", 0)
        if not self._was_synced:
            missing = [replica_id for replica_id in replicas if not self.subscribers.is_synced(replica_id)]
            if missing and not self._is_missed_too_long(missing):
                reason = (
                    f"the cache of {len(missing)} of {counted(len(replicas), 'replica')} is not known yet"
                )
                return Readiness(reason, len(replicas))
            self._was_synced = True
        return Readiness(None, len(replicas))

    def _is_missed_too_long(self, missing: Sequence[ReplicaId]) -> bool:
        """They have had their time; they are routed by load."""
        now = self._clock()
        if self._missed_since_s is None:
            self._missed_since_s = now
        if now < self._missed_since_s + SNAPSHOT_LIMIT_S:
            return False
        told = {"replicas": ", ".join(sorted(missing)), "waited_s": SNAPSHOT_LIMIT_S}
        logger.warning("ready without the caches of these replicas: can their ports be reached?", extra=told)
        return True

    async def until_model_is_served(self, first_news_s: float = FIRST_NEWS_S) -> None:
        """While a rolling update changes the model, or what replicas tell of themselves: until there is one
        that this Router can send requests to.

        The Router that it is to replace serves meanwhile, whose replicas are there: this one would refuse
        everybody for as long as loading takes. Where there is no replica at all, nobody serves better.
        first_news_s: so long nothing being heard of replicas may mean that it will be.
        """
        news = asyncio.Event()
        self.routing.watch_membership(lambda _: news.set())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(first_news_s):
                await news.wait()
        while self.routing.foreign and not self.routing.replicas:
            news.clear()
            await news.wait()

    def _engines(self) -> dict[ReplicaId, EngineView]:
        reports = self.subscribers.statistics().reports
        return {name: EngineView(info, reports.get(name)) for name, info in self.routing.replicas.items()}

    def _turn_of(self, owner: str) -> Turn | None:
        """A prefix's copies have the turn of requests that its key sends without a priority."""
        key = self.tenancy.of_owner(owner)
        return None if key is None else Turn(key.tenant, key.share, Visit(key).priority(None))

    def _doubt(self, replica_id: ReplicaId) -> None:
        self.subscribers.resync(replica_id)

    async def aclose(self) -> None:
        await self.hot_copies.aclose()
        await self.succession.aclose()
        await self.directory.hand_on()
        await self.directory.aclose()
        await self.prefixes.hand_on()
        await self.prefixes.aclose()
        await self.fleet.aclose()
        self.dispatcher.close()
        self.service.close()
        await self.subscribers.aclose()
        await self.insight.aclose()
        await self.tenancy.aclose()
        self._encoder.close()
        await asyncio.to_thread(self._tracing.close)
