"""How deltas come from replicas, as series: a fall back to Ray's calls shows here at once."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.deltas.delta_channels import ChannelStatistics
from router.scraped import Scraped, counters


class DeltaCollector(Scraped[ChannelStatistics]):
    """Reads the channels when scraped, so that a replica that left has no series left behind."""

    def families(self, numbers: ChannelStatistics) -> Iterable[Metric]:
        yield counters(
            "warmpath_delta_streams",
            "Attempts, by how deltas came: over a connection of ours, or for want of one by Ray's call.",
            "way",
            {"channel": numbers.by_channel, "call": numbers.by_call},
        )
        yield CounterMetricFamily(
            "warmpath_delta_channels_lost",
            "Connections for deltas that ended before their replica left.",
            numbers.lost,
        )
        family = GaugeMetricFamily(
            "warmpath_replica_delta_channel",
            "1 = its deltas come over a connection of ours; 0 = by Ray's calls, at more CPU.",
            labels=("replica",),
        )
        for replica_id, is_open in numbers.open_by_replica.items():
            family.add_metric((replica_id,), is_open)
        yield family
