"""Manifests that no API server would take as they were meant."""

from __future__ import annotations

import pytest

from k8s.places import PLACES
from tests.unit.k8s.breaks import Break, beside, cluster, container, drop, findings, group, head, shipped

IN_DEMO: list[tuple[Break, str]] = [
    (lambda t: cluster(t).update(authOption={}), "'authOption' was unexpected"),
    (lambda t: container(t, 0)["resources"].update(limit={}), "'limit' was unexpected"),
    (lambda t: head(t).update(terminationGracePeriodSeconds="long"), "'long' is not of type 'integer'"),
    (lambda t: cluster(t)["authOptions"].update(mode="tokens"), "'tokens' is not one of"),
    (lambda t: drop(group(t, 0), "groupName"), "'groupName' is a required property"),
    (lambda t: t["RayService/warmpath"].update(apiVersion="ray.io/v2"), "ray.io/v2 is not served"),
    (lambda t: t["NetworkPolicy/deny-all"]["spec"].update(podSelectors={}), "'podSelectors' was unexpected"),
    (lambda t: t["RayService/warmpath"]["metadata"].update(name="Warm_path"), "metadata.name: 'Warm_path'"),
]


IN_HA: list[tuple[Break, str]] = [
    (
        lambda t: t["PodDisruptionBudget/warmpath-routers"].update(apiVersion="policy/v1beta1"),
        "no PodDisruptionBudget in policy/v1beta1",
    ),
]


MONITORING: list[tuple[Break, str]] = [
    (lambda t: t["PodMonitor/warmpath-ray"]["spec"].update(podMetricsEndpoint=[]), "was unexpected"),
    (
        lambda t: t["PrometheusRule/warmpath"]["spec"]["groups"][0]["rules"][0].update(form="1m"),
        "'form' was unexpected",
    ),
]


@pytest.mark.parametrize(("change", "words"), IN_DEMO)
def test_mistake_in_the_demo_is_found(change: Break, words: str) -> None:
    told = findings(shipped("cpu-demo"), change)
    assert any(words in each for each in told), told


@pytest.mark.parametrize(("change", "words"), IN_HA)
def test_mistake_in_the_cluster_for_availability_is_found(change: Break, words: str) -> None:
    told = findings(shipped("ha"), change)
    assert any(words in each for each in told), told


@pytest.mark.parametrize(("change", "words"), MONITORING)
def test_mistake_in_monitoring_is_found(change: Break, words: str) -> None:
    told = findings(beside("gpu", PLACES["monitoring"].kept.read_text()), change)
    assert any(words in each for each in told), told
