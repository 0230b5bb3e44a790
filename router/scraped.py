"""Metrics that are read where they are kept, at the moment of a scrape. Knows Prometheus alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Numbers = TypeVar("Numbers")


class Scraped(Collector, Generic[Numbers]):
    """A collector of what `read` returns; whatever has gone from there has gone from the metrics too."""

    def __init__(self, read: Callable[[], Numbers]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read at registration

    def collect(self) -> Iterable[Metric]:
        return self.families(self._read())

    @abstractmethod
    def families(self, numbers: Numbers) -> Iterable[Metric]:
        """Every series of one scrape."""


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    """One counter for each value of one label."""
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def buckets(bounds: Sequence[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """A histogram's, as Prometheus has them: values up to each bound. counts: one more than bounds."""
    names = (*(str(float(bound)) for bound in bounds), "+Inf")
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def histogram(
    name: str, text: str, bounds: Sequence[float], counts: Iterable[int], total: float
) -> HistogramMetricFamily:
    """One without labels. total: of the values."""
    return HistogramMetricFamily(name, text, buckets=buckets(bounds, counts), sum_value=total)
