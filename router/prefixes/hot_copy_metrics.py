"""What this Router has had computed of hot prefixes beside its requests, as series."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from router.prefixes.hot_copies import HotCopyStatistics
from router.scraped import Scraped


class HotCopyCollector(Scraped[HotCopyStatistics]):
    """Reads the copies' counts when scraped."""

    def families(self, numbers: HotCopyStatistics) -> Iterable[Metric]:
        copies = CounterMetricFamily(
            "warmpath_hot_copies",
            "Copies of hot prefixes that one more replica was to compute, with no request waiting for it.",
            labels=["outcome"],
        )
        copies.add_metric(["made"], numbers.num_made)
        copies.add_metric(["failed"], numbers.num_failed)
        yield copies
        yield CounterMetricFamily(
            "warmpath_hot_copy_tokens",
            "Prompt tokens that replicas have computed for such copies. They are no request's.",
            numbers.num_tokens,
        )
