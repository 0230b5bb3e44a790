"""Manifests that no API server would take as they were meant."""

from __future__ import annotations

import pytest

from tests.unit.k8s.breaks import Break, cluster, container, drop, found_in, group, head, in_places

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


@pytest.mark.parametrize(
    ("place", "change", "words"), in_places({"cpu-demo": IN_DEMO, "ha": IN_HA, "monitoring": MONITORING})
)
def test_mistake_is_found(place: str, change: Break, words: str) -> None:
    told = found_in(place, change)
    assert any(words in each for each in told), told
