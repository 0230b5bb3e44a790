"""The text a scraper gets, read back with `prometheus_client`'s own parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.fleet.exposition import merged, text
from router.fleet.report import Family, Series, families_of, labelled


def a_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = Counter("jobs", 'Jobs, "done"\nor \\ not.', ("kind",), registry=registry)
    counter.labels('a "quoted"\nkind \\').inc(3)
    counter.labels("plain").inc(0.5)
    Gauge("temperature", "Degrees.", registry=registry).set(float("-inf"))
    Histogram("seconds", "Time.", buckets=(0.1, 1.0), registry=registry).observe(0.5)
    return registry


def read(
    exposition: bytes,
) -> list[tuple[str, str, str, dict[tuple[str, frozenset[tuple[str, str]]], float]]]:
    return [
        (
            family.name,
            family.type,
            family.documentation,
            {(s.name, frozenset(s.labels.items())): s.value for s in family.samples},
        )
        for family in text_string_to_metric_families(exposition.decode())
        if not family.name.endswith("_created")
    ]


def test_it_reads_like_the_librarys_own() -> None:
    registry = a_registry()
    assert read(text(families_of(registry.collect()))) == read(generate_latest(registry))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (1e300, "1e+300"), (0.1, "0.1")],
)
def test_every_number_has_its_form(value: float, shown: str) -> None:
    family = Family("x", "X.", "gauge", (Series("x", {}, value),))
    assert text([family]).decode().splitlines()[-1] == f"x {shown}"


def test_the_series_of_one_metric_stand_together() -> None:
    """The format allows a name one block, whoever its series come from."""
    both = [*labelled(families_of(a_registry().collect()), {"router": "a"})]
    both += labelled(families_of(a_registry().collect()), {"router": "b"})
    lines = text(merged(both)).decode().splitlines()
    assert len([line for line in lines if line.startswith("# TYPE jobs_total ")]) == 1
    names = [line.split("{")[0] for line in lines if line.startswith("seconds_bucket")]
    assert len(names) == 6


def test_a_metric_of_another_kind_does_not_spoil_the_scrape() -> None:
    """Two versions of a Router meet in a rolling update."""
    old = Family("x", "X.", "gauge", (Series("x", {"router": "a"}, 1.0),))
    new = Family("x", "X.", "counter", (Series("x_total", {"router": "b"}, 1.0),))
    assert [family.series for family in merged([old, new])] == [old.series]


def test_a_label_that_is_ours_to_set_is_refused() -> None:
    registry = CollectorRegistry()
    Gauge("x", "X.", ("router",), registry=registry).labels("a")
    with pytest.raises(ValueError, match="label 'router'"):
        families_of(registry.collect())
