"""What all generations of a Router share. Owner: the router's event loop."""

from __future__ import annotations

from collections.abc import Callable

from cache.block_hash import BlockHasher
from cache.tracing import NoTracing, Tracing
from router.config import RouterConfig
from router.dispatch.generation import Generation
from router.dispatch.job import Job
from router.dispatch.replica_calls import ReplicaCalls
from router.dispatch.token_accounts import TokenAccounts
from router.metrics import RouterMetrics
from router.placement.placing import make_placer
from router.placement.routing import Routing


class Dispatcher:
    """Starts generations. Holds what all of them share; they hold the rest."""

    def __init__(
        self,
        config: RouterConfig,
        routing: Routing,
        calls: ReplicaCalls,
        hasher: BlockHasher,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self.tracing = tracing or NoTracing()
        self.config = config
        self.routing = routing
        self.calls = calls
        self.hasher = hasher
        self.metrics = metrics
        self.clock = clock
        self.placer = make_placer(config, routing, clock)
        self.accounts = TokenAccounts(clock)
        routing.watch_ends(self.accounts.told)

    def work_told(self) -> tuple[float, float]:
        """`held_s` and `refused_ratio` of every request that is sent now."""
        return self.routing.share_s(self.placer.held_s), self.placer.refused_ratio

    def close(self) -> None:
        """Place nothing any more. Idempotent."""
        self.placer.close()

    def start(self, job: Job) -> Generation:
        """A generation that does nothing until it is iterated."""
        return Generation(self, job)
