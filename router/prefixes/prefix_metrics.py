"""What this Router has done about held prefixes, as series. What is held, engines tell themselves."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.prefixes.keeper import KeeperStatistics
from router.scraped import Scraped


class PrefixCollector(Scraped[KeeperStatistics]):
    """Reads the keeper when scraped. No label names a prefix or a key: their number has no bound."""

    def families(self, numbers: KeeperStatistics) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "warmpath_prefixes_kept",
            "Held prefixes whose lost copies this Router makes again.",
            numbers.num_kept,
        )
        yield CounterMetricFamily(
            "warmpath_prefix_copies_made",
            "Copies of prefixes that replicas were made to hold.",
            numbers.num_copies_made,
        )
        yield CounterMetricFamily(
            "warmpath_prefix_copies_restored",
            "Of those, copies made because one was lost.",
            numbers.num_copies_restored,
        )
        yield CounterMetricFamily(
            "warmpath_prefixes_refused",
            "Prefixes refused because they do not fit beside those that are held.",
            numbers.num_refused,
        )
        yield CounterMetricFamily(
            "warmpath_prefixes_adopted",
            "Prefixes kept since the Router that had kept them is gone.",
            numbers.num_adopted,
        )
