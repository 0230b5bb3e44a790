"""Keys, limits and salts of one Router, put together from its settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.scraped import Scraped, counters
from router.tenants.allowance import ANYBODY
from router.tenants.cache_salts import CacheSalts
from router.tenants.gate import REFUSALS, Gate, GateStatistics
from router.tenants.key_ring import KeyRing, source_of
from router.tenants.key_table import ApiKey
from router.tenants.settings import TenantSettings


class Tenancy:
    """`gate` is None where nobody needs a key. Build on the event loop; `aclose` once."""

    def __init__(
        self,
        settings: TenantSettings,
        *,
        peers: Callable[[], tuple[int, int]],
        clock: Callable[[], float],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises ConfigError: a Router that does not know its keys or its secret must not start."""
        self.salts = CacheSalts(settings.scope, settings.read_secret(environment))
        self.gate: Gate | None = None
        self._watching: asyncio.Task[None] | None = None
        if settings.has_keys:
            ring = KeyRing(source_of(settings, environment))
            self.gate = Gate(ring, peers=peers, clock=clock)
            self._watching = asyncio.create_task(ring.watch(), name="watch API keys")

    def of_owner(self, owner: str) -> ApiKey | None:
        """Whose prefixes are named so; None: nobody's any more, whose key has been removed."""
        if self.gate is None:
            return ANYBODY if owner == ANYBODY.owner else None
        return self.gate.of_owner(owner)

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)


def check_settings(settings: TenantSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Whether a Router on this machine would find its keys and its secret. Raises ConfigError."""
    settings.read_secret(environment)
    if settings.has_keys:
        KeyRing(source_of(settings, environment))


class GateCollector(Scraped[GateStatistics]):
    """Reads the gate when scraped. No label names a key or a tenant: their number has no bound."""

    def families(self, numbers: GateStatistics) -> Iterable[Metric]:
        yield GaugeMetricFamily("warmpath_api_keys", "Keys that work now.", numbers.num_keys)
        yield GaugeMetricFamily(
            "warmpath_keys_stale",
            "1 = what the keys are now cannot be read: those of before go on working.",
            float(numbers.are_stale),
        )
        yield CounterMetricFamily(
            "warmpath_key_reloads", "Times that changed keys were read.", numbers.num_reloads
        )
        yield CounterMetricFamily(
            "warmpath_key_read_failures", "Times that the keys could no more be read.", numbers.num_failures
        )
        yield counters(
            "warmpath_key_refusals",
            "Requests refused for their key or its limits, by why.",
            "why",
            {why: numbers.refusals[why] for why in REFUSALS},
        )
