"""Names, labels, ports, mounts and secrets that lead nowhere are found, and others let be."""

from __future__ import annotations

from typing import Any

import pytest

from k8s.manifests import GATEWAY_LABEL
from k8s.places import PLACES
from tests.unit.k8s.breaks import (
    Break,
    beside,
    cluster,
    container,
    drop,
    findings,
    found_in,
    head,
    in_places,
    policy,
    serve,
    shipped,
    worker,
)

IN_DEMO: list[tuple[Break, str]] = [
    (lambda t: worker(t, 0).update(serviceAccountName="warm"), "no ServiceAccount is called 'warm'"),
    (lambda t: worker(t, 0).update(priorityClassName="high"), "no PriorityClass is called 'high'"),
    (lambda t: container(t, 0)["volumeMounts"][0].update(name="temp"), "no volume is called 'temp'"),
    (
        lambda t: container(t, 0)["volumeMounts"].pop(0),
        "nobody mounts 'tmp'",
    ),
    (
        lambda t: container(t, 0)["readinessProbe"]["httpGet"].update(port="http"),
        "readinessProbe: no container port is 'http'",
    ),
    (
        lambda t: t["NetworkPolicy/ray-to-ray"]["spec"]["podSelector"]["matchLabels"].update(x="y"),
        "selects no pod",
    ),
    (lambda t: serve(t, "model: tiny", "model: Qwen/Qwen3-8B"), "which HF_HUB_OFFLINE forbids to fetch"),
    (
        lambda t: t["NetworkPolicy/operator-to-ray"]["spec"]["ingress"][0]["ports"][0].update(port=8266),
        "port 8266: no selected pod has it",
    ),
    (
        lambda t: cluster(t)["headGroupSpec"]["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/name": "warmpath"}
        ),
        "the head's Service selects by KubeRay's own value",
    ),
    (lambda t: t["ServiceAccount/warmpath"]["metadata"].update(namespace="other"), "should be warmpath"),
    (
        lambda t: worker(t, 0)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b"),
        "does not match the pod itself",
    ),
    (lambda t: serve(t, "port: 8000", "port: 8001"), "http_options.port is 8001"),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /var/tmp/traces}"),
        "args.router.record.folder is /var/tmp/traces, which no volume holds",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /tmp/t, max_total_bytes: 8000000000}"),
        "record.max_total_bytes is 8000000000; should be at most half of volume tmp, which has 8Gi",
    ),
    (lambda t: policy(t, "operator-to-ray")["ports"].append({"port": "gcs-serve"}), "port gcs-serve: no sel"),
    (
        lambda t: t["NetworkPolicy/ray-to-ray"]["spec"]["podSelector"].update(
            matchExpressions=[{"key": "ray.io/group", "operator": "DoesNotExist"}]
        ),
        "NetworkPolicy/ray-to-ray: selects no pod",
    ),
]


IN_HA: list[tuple[Break, str]] = [
    (
        lambda t: next(each for each in worker(t, 0)["volumes"] if "secret" in each)["secret"].update(
            secretName="keys"
        ),
        "no Secret 'keys' is known",
    ),
    (lambda t: drop(t, "PersistentVolumeClaim/warmpath-models"), "no PersistentVolumeClaim is called"),
    (lambda t: serve(t, "/models/model", "/weights/model"), "/weights/model, which no volume holds"),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /tmp/t, key_file: /etc/key}"),
        "args.router.record names /etc/key, which no volume holds",
    ),
    (lambda t: drop(head(t), "initContainers"), "no init container with MODEL=/models/model waits"),
    (
        lambda t: serve(t, "/models/model", "/models/other"),
        "no init container with MODEL=/models/other waits",
    ),
    (
        lambda t: serve(t, "/etc/warmpath/keys.yaml", "/etc/warmpath/key.yaml"),
        "key.yaml, which no volume holds",
    ),
    (
        lambda t: serve(t, "keys_file: /etc/warmpath/keys.yaml", "keys_variable: KEYS"),
        "routers: args.router.tenants.keys_variable is KEYS, which the container's env does not set",
    ),
    (
        lambda t: serve(t, "secret_file: /etc/warmpath/secret", "secret_variable: SALT"),
        "routers: args.router.tenants.secret_variable is SALT, which the container's env does not set",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /models/traces}"),
        "folder is /models/traces, and volume models there cannot be written to",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /etc/warmpath}"),
        "folder is /etc/warmpath, and volume api-keys there cannot be written to",
    ),
    (
        lambda t: cluster(t)["gcsFaultToleranceOptions"].update(redisAddress="redis:6379"),
        "redisAddress: no Service and port",
    ),
    (
        lambda t: t["Service/warmpath-redis"]["spec"]["ports"][0].update(targetPort="db"),
        "targetPort 'db': no container port",
    ),
    (
        lambda t: cluster(t)["gcsFaultToleranceOptions"].update(redisPassword={"value": "hunter2"}),
        "redisPassword: must come from a Secret",
    ),
    (
        lambda t: t["PodDisruptionBudget/warmpath-engines"]["spec"]["selector"]["matchLabels"].update(x="y"),
        "selects no pod",
    ),
]


IN_UPGRADE: list[tuple[Break, str]] = [
    (
        lambda t: t["NetworkPolicy/everybody-to-gateway"]["spec"]["ingress"][0]["ports"][0].update(port=8080),
        "port 8080: no selected pod has it",
    ),
    (
        lambda t: t["NetworkPolicy/everybody-to-gateway"]["spec"]["podSelector"]["matchLabels"].update(
            {GATEWAY_LABEL: "gateway"}
        ),
        "selects no pod",
    ),
    (lambda t: drop(t["RayService/warmpath"]["spec"], "upgradeStrategy"), "selects no pod"),
]


MONITORING: list[tuple[Break, str]] = [
    (
        lambda t: t["ScrapeConfig/warmpath"]["spec"]["staticConfigs"][0].update(
            targets=["warmpath-serve-svc.warmpath.svc:8000"]
        ),
        "scrapes warmpath-serve-svc, which is none of ['warmpath-metrics']",
    ),
    (
        lambda t: t["ScrapeConfig/warmpath"]["spec"]["staticConfigs"][0].update(
            targets=["warmpath-metrics.warmpath.svc:80"]
        ),
        "sends to port 80",
    ),
    (
        lambda t: t["ScrapeConfig/warmpath"]["spec"]["authorization"]["credentials"].update(key="token"),
        "Secret warmpath-scrape-key has no key 'token'",
    ),
    (
        lambda t: t["PodMonitor/warmpath-ray"]["spec"]["podMetricsEndpoints"][0].update(port="ray"),
        "not every selected pod has it",
    ),
]


@pytest.mark.parametrize(
    ("place", "change", "words"),
    in_places({"cpu-demo": IN_DEMO, "ha": IN_HA, "upgrade": IN_UPGRADE, "monitoring": MONITORING}),
)
def test_mistake_is_found(place: str, change: Break, words: str) -> None:
    told = found_in(place, change)
    assert any(words in each for each in told), told


def redis_elsewhere(things: dict[str, dict[str, Any]]) -> None:
    """As components/redis advises: a managed one, by its own name or by a Service without pods."""
    for name in ("StatefulSet/warmpath-redis", "NetworkPolicy/ray-to-redis"):
        drop(things, name)
    things["Service/warmpath-redis"]["spec"] = {
        "type": "ExternalName",
        "externalName": "redis.example.com",
        "ports": [{"port": 6379}],
    }
    assert cluster(things)["gcsFaultToleranceOptions"]["redisAddress"] == "warmpath-redis:6379"


def redis_by_a_name_of_ours(things: dict[str, dict[str, Any]]) -> None:
    """The same without ports, as such a Service may be."""
    redis_elsewhere(things)
    del things["Service/warmpath-redis"]["spec"]["ports"]


def keys_from_the_environment(things: dict[str, dict[str, Any]]) -> None:
    serve(things, "keys_file: /etc/warmpath/keys.yaml", "keys_variable: KEYS")
    source = {"secretKeyRef": {"name": "warmpath-api-keys", "key": "keys.yaml"}}
    for each in (head(things)["containers"][0], container(things, 0), container(things, 1)):
        each["env"].append({"name": "KEYS", "valueFrom": source})


@pytest.mark.parametrize(
    "change",
    [
        redis_elsewhere,
        redis_by_a_name_of_ours,
        lambda t: cluster(t)["gcsFaultToleranceOptions"].update(
            redisAddress="rediss://redis.example.com:6380"
        ),
        lambda t: cluster(t)["gcsFaultToleranceOptions"].update(
            redisAddress="warmpath-redis.warmpath.svc:6379"
        ),
        lambda t: cluster(t)["gcsFaultToleranceOptions"].update(redisAddress="redis.databases.svc:6379"),
        keys_from_the_environment,
        lambda t: policy(t, "operator-to-ray")["ports"][0].update(port="dashboard"),
        lambda t: worker(t, 0)["topologySpreadConstraints"][1].pop("labelSelector"),
        lambda t: t["PodDisruptionBudget/warmpath-engines"]["spec"]["selector"].update(
            matchExpressions=[
                {"key": "ray.io/group", "operator": "In", "values": ["engines"]},
                {"key": "ray.io/group", "operator": "NotIn", "values": ["routers"]},
                {"key": "ray.io/group", "operator": "Exists"},
                {"key": "spot", "operator": "DoesNotExist"},
            ]
        ),
    ],
)
def test_what_places_have_otherwise_is_fine(change: Break) -> None:
    """Each was named as a mistake, or ended the check."""
    assert findings(shipped("ha"), change) == []


@pytest.mark.parametrize("host", ["redis.warmpath.svc.cluster.local", "redis.warmpath"])
def test_a_managed_redis_that_is_a_service_here_is_still_looked_for(host: str) -> None:
    def elsewhere(things: dict[str, dict[str, Any]]) -> None:
        cluster(things)["gcsFaultToleranceOptions"]["redisAddress"] = f"{host}:6379"

    (told,) = findings(shipped("ha"), elsewhere)
    assert "redisAddress: no Service and port are 'redis" in told


def test_a_service_may_be_scraped_by_any_of_its_names() -> None:
    """The longest was named as another Service."""
    metrics = "warmpath-metrics.warmpath.svc.cluster.local:8000"

    def by_its_whole_name(things: dict[str, dict[str, Any]]) -> None:
        things["ScrapeConfig/warmpath"]["spec"]["staticConfigs"][0].update(targets=[metrics])

    assert findings(beside("gpu", PLACES["monitoring"].kept.read_text()), by_its_whole_name) == []


def headless(things: dict[str, dict[str, Any]]) -> None:
    things["Service/engines"] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "engines", "namespace": "warmpath"},
        "spec": {"clusterIP": "None", "selector": {"ray.io/group": "engines"}},
    }


def test_a_service_without_ports_is_fine() -> None:
    """It ended the check."""
    assert findings(shipped("gpu"), headless) == []


def test_a_recording_below_tmp_is_fine() -> None:
    def record(things: dict[str, dict[str, Any]]) -> None:
        serve(things, "expose_routing: false", "record: {folder: /tmp/traces}")

    assert findings(shipped("ha"), record) == []
