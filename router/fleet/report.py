"""What one Router tells another of its metrics: its own series, and the last it heard of those that are gone.

    FleetReport  =  [RouterReport: number, age, families]  +  {replica: EngineReport}

Travels between the Routers of one application as bytes (msgpack, strict types, a size cap), so that two
versions of this code that meet in a rolling update refuse each other's format instead of failing in it.
Knows series; knows neither who asks whom (`gather.py`) nor what the series mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from prometheus_client.core import Metric

from cache.engine_report import EngineReport, check_report
from cache.errors import WireError
from cache.types import ReplicaId
from cache.wire import WireFormat

FORMAT_VERSION = 1
MAX_REPORT_BYTES = 32 << 20  # a Router's series have some 20 KB, an engine's report 2
ROUTER_LABEL = "router"

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
MetricName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", max_length=200)]
LabelName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", max_length=200)]
RouterName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class Series(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line of an exposition."""

    name: MetricName  # with its suffix: _total, _bucket, _sum, _count
    labels: dict[LabelName, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The series of one metric."""

    name: MetricName
    documentation: str
    kind: Literal["counter", "gauge", "histogram"]
    series: tuple[Series, ...]


class RouterReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One Router's series at one moment."""

    router: RouterName  # of one life of one process: a restarted Router has another name
    number: NonNegative  # of this report, from 1: in a later one no counter is smaller
    age_s: float  # since it was made
    families: tuple[Family, ...]


class FleetReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fleet"):
    """A Router's answer to another."""

    version: int
    router: RouterName  # who answers
    routers: tuple[RouterReport, ...]  # its own first; then its latest of others that no longer answer it
    engines: dict[ReplicaId, EngineReport]  # its latest


def encode_fleet(report: FleetReport) -> bytes:
    """The report as msgpack. Raises WireError if no receiver would take it."""
    return _FORMAT.encode(report)


def decode_fleet(wire: bytes) -> FleetReport:
    """Inverse of `encode_fleet`. Raises WireError, naming what is wrong, for everything else."""
    report = _FORMAT.decode(wire)
    for router in report.routers:
        if not (math.isfinite(router.age_s) and router.age_s >= 0):
            raise WireError(f"malformed fleet report: age_s is {router.age_s}")
    for engine in report.engines.values():
        check_report(engine)
    return report


def families_of(metrics: Iterable[Metric]) -> tuple[Family, ...]:
    """What a registry collects, without the times at which each series began: they would double the lines.

    Raises ValueError for a metric of a kind that has no place here, or with a label that is ours to set.
    """
    return tuple(_family(metric) for metric in metrics)


def labelled(families: Iterable[Family], labels: Mapping[str, str]) -> Iterable[Family]:
    """The same series with these labels after their own."""
    for family in families:
        series = tuple(Series(s.name, {**s.labels, **labels}, s.value) for s in family.series)
        yield Family(family.name, family.documentation, family.kind, series)


def _family(metric: Metric) -> Family:
    kind = metric.type
    if kind not in ("counter", "gauge", "histogram"):
        raise ValueError(f"{metric.name} is a {kind}")
    series = []
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        if ROUTER_LABEL in sample.labels:
            raise ValueError(f"{metric.name} has a label {ROUTER_LABEL!r} of its own")
        series.append(Series(sample.name, sample.labels, float(sample.value)))
    return Family(metric.name, metric.documentation, kind, tuple(series))  # type: ignore[arg-type]


_FORMAT = WireFormat(FleetReport, "fleet report", version=FORMAT_VERSION, max_bytes=MAX_REPORT_BYTES)
