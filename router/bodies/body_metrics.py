"""How bodies go to Serve's Python proxies, as a series: a fall back to Serve's calls shows here."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from router.bodies.body_channel import BodyStatistics
from router.scraped import Scraped, counters


class BodyCollector(Scraped[BodyStatistics]):
    """Reads the channel when scraped."""

    def families(self, numbers: BodyStatistics) -> Iterable[Metric]:
        yield counters(
            "warmpath_body_streams",
            "Streamed answers to Serve's Python proxy, by how they went: over a connection of ours, or for "
            "want of one by Serve's call.",
            "way",
            {"channel": numbers.by_channel, "call": numbers.by_call},
        )
