"""Several Routers' metrics in one process, asking each other directly; any of them can hang or be gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from cache.types import ReplicaId
from router.fleet.engine_series import EngineView
from router.fleet.gather import FleetMetrics
from tests.fakes.router import FakeClock

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
Values = dict[SeriesKey, float]


class OneRouter:
    """A Router with a few series of its own."""

    def __init__(self, name: str, fleet: SomeRouters) -> None:
        registry = CollectorRegistry()
        self.name = name
        self.is_hung = False
        self.engines: dict[ReplicaId, EngineView] = {}
        self.requests = Counter("warmpath_requests", "Requests.", ("outcome",), registry=registry)
        self.in_flight = Gauge("warmpath_in_flight", "In flight.", registry=registry)
        self.seconds = Histogram("warmpath_seconds", "Time.", buckets=(0.1, 1.0), registry=registry)
        self.metrics = FleetMetrics(
            name, model_name="m", own=registry.collect, engines=lambda: self.engines, clock=fleet.clock
        )
        self.metrics.peers = fleet

    def work(self, count: int = 1) -> None:
        for _ in range(count):
            self.requests.labels("ok").inc()
            self.seconds.observe(0.5)

    async def scrape(self) -> Values:
        return parsed(await self.metrics.text())


class SomeRouters:
    """`Peers` of every Router in it."""

    def __init__(self, *names: str) -> None:
        self.clock = FakeClock()
        self.routers: dict[str, OneRouter] = {}
        self.num_asked = 0
        self.asked = asyncio.Event()
        self.hold: asyncio.Event | None = None  # answers wait for it
        for name in names:
            self.start(name)

    def start(self, name: str) -> OneRouter:
        router = self.routers[name] = OneRouter(name, self)
        return router

    def stop(self, name: str) -> None:
        del self.routers[name]

    async def ask(self, asker: str, wanted: Sequence[str], timeout_s: float) -> list[bytes]:
        self.num_asked += 1
        self.asked.set()
        answers = [
            router.metrics.answer(asker, wanted) for router in self.routers.values() if not router.is_hung
        ]
        if self.hold is not None:
            await self.hold.wait()
        return answers


def parsed(exposition: bytes) -> Values:
    """Every series with its value, read by `prometheus_client`; each must be there once."""
    values: Values = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in values, f"{key} is there twice"
            values[key] = sample.value
    return values


def value(values: Values, name: str, **labels: str) -> float | None:
    """Of one series; None if it is not there."""
    return values.get((name, tuple(sorted(labels.items()))))


def counted(values: Values) -> Values:
    """Those that may never shrink."""
    suffixes = ("_total", "_bucket", "_count", "_sum")
    return {key: number for key, number in values.items() if key[0].endswith(suffixes)}
