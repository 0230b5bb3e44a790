"""Deliberately broken manifests: each mistake is found, and named where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.router_variable import ROUTER_VARIABLE
from k8s.check import beside, manifest_findings, prefix_findings
from k8s.hardening import DRAIN_VARIABLE
from k8s.manifests import GATEWAY_LABEL, Manifests, named, quantity
from k8s.places import PLACES, ROOT, Place

SCRAPES = "kind: ScrapeConfig\nmetadata:\n  namespace: warmpath\n"  # as kustomize has it
Break = Callable[[dict[str, dict[str, Any]]], None]


@pytest.fixture(scope="module")
def shipped() -> dict[str, Manifests]:
    return {name: Manifests.parse(place.kept.read_text()) for name, place in PLACES.items()}


def findings(manifests: Manifests, change: Break) -> list[str]:
    things = {named(each): copy.deepcopy(dict(each)) for each in manifests.objects}
    change(things)
    return [str(each) for each in manifest_findings("x", Manifests(tuple(things.values())))]


def cluster(things: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = things["RayService/warmpath"]["spec"]["rayClusterConfig"]
    return spec


def head(things: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = cluster(things)["headGroupSpec"]["template"]["spec"]
    return spec


def group(things: dict[str, dict[str, Any]], index: int) -> dict[str, Any]:
    found: dict[str, Any] = cluster(things)["workerGroupSpecs"][index]
    return found


def worker(things: dict[str, dict[str, Any]], index: int) -> dict[str, Any]:
    spec: dict[str, Any] = group(things, index)["template"]["spec"]
    return spec


def container(things: dict[str, dict[str, Any]], index: int) -> dict[str, Any]:
    found: dict[str, Any] = worker(things, index)["containers"][0]
    return found


def serve(things: dict[str, dict[str, Any]], before: str, after: str) -> None:
    spec = things["RayService/warmpath"]["spec"]
    assert before in spec["serveConfigV2"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace(before, after)


def two_cards_each(things: dict[str, dict[str, Any]]) -> None:
    serve(things, "num_gpus: 1", "num_gpus: 2")
    serve(things, "device: cuda\n", "device: cuda\n      tensor_parallel: 2\n")


def undrained(container: dict[str, Any]) -> None:
    container["env"] = [each for each in container["env"] if each["name"] != DRAIN_VARIABLE]


def unscaled(things: dict[str, dict[str, Any]], pods: int) -> None:
    """Without components/autoscaling, and so many pods for engines."""
    for key in ("enableInTreeAutoscaling", "autoscalerOptions"):
        drop(cluster(things), key)
    head(things)["volumes"] = [each for each in head(things)["volumes"] if each["name"] != "kubernetes-api"]
    group(things, 1).update(replicas=pods)


def two_replicas(things: dict[str, dict[str, Any]], **others: Any) -> None:
    """That do not scale, with these options besides."""
    config = yaml.safe_load(things["RayService/warmpath"]["spec"]["serveConfigV2"])
    options = config["applications"][0]["deployments"][1]
    del options["autoscaling_config"]
    options |= {"num_replicas": 2, **others}
    things["RayService/warmpath"]["spec"]["serveConfigV2"] = yaml.safe_dump(config)


def idle(things: dict[str, dict[str, Any]]) -> None:
    unscaled(things, 8)
    two_replicas(things)


def drop(mapping: dict[str, Any], key: str) -> None:
    del mapping[key]


SCHEMA: list[tuple[Break, str]] = [
    (lambda t: cluster(t).update(authOption={}), "'authOption' was unexpected"),
    (lambda t: container(t, 0)["resources"].update(limit={}), "'limit' was unexpected"),
    (lambda t: head(t).update(terminationGracePeriodSeconds="long"), "'long' is not of type 'integer'"),
    (lambda t: cluster(t)["authOptions"].update(mode="tokens"), "'tokens' is not one of"),
    (lambda t: drop(group(t, 0), "groupName"), "'groupName' is a required property"),
    (lambda t: t["RayService/warmpath"].update(apiVersion="ray.io/v2"), "ray.io/v2 is not served"),
    (lambda t: t["NetworkPolicy/deny-all"]["spec"].update(podSelectors={}), "'podSelectors' was unexpected"),
    (lambda t: t["RayService/warmpath"]["metadata"].update(name="Warm_path"), "metadata.name: 'Warm_path'"),
]

REFERENCES: list[tuple[Break, str]] = [
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
]


def policy(things: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Its one rule."""
    rule: dict[str, Any] = things[f"NetworkPolicy/{name}"]["spec"]["ingress"][0]
    return rule


POLICIES: list[tuple[Break, str]] = [
    (
        lambda t: policy(t, "namespace-to-serve")["ports"][0].update(endPort=8264),
        "opens 263 ports, 8001 to 8264",
    ),
    (lambda t: policy(t, "namespace-to-serve")["ports"][0].pop("port"), "opens every port"),
    (lambda t: policy(t, "operator-to-ray")["ports"].append({"port": "gcs-serve"}), "port gcs-serve: no sel"),
    (
        lambda t: policy(t, "namespace-to-serve").update({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}),
        "is open to everybody",
    ),
    (
        lambda t: policy(t, "namespace-to-serve").update({"from": [{"namespaceSelector": {}}]}),
        "is open to everybody",
    ),
    (
        lambda t: t["NetworkPolicy/deny-all"]["spec"].update(policyTypes=["Egress"]),
        "no NetworkPolicy closes it by default",
    ),
    (
        lambda t: t["NetworkPolicy/ray-to-ray"]["spec"]["podSelector"].update(
            matchExpressions=[{"key": "ray.io/group", "operator": "DoesNotExist"}]
        ),
        "NetworkPolicy/ray-to-ray: selects no pod",
    ),
]

BUDGETS: list[tuple[Break, str]] = [
    (
        lambda t: t["PodDisruptionBudget/warmpath-routers"].update(apiVersion="policy/v1beta1"),
        "no PodDisruptionBudget in policy/v1beta1",
    ),
    (
        lambda t: t["PodDisruptionBudget/warmpath-engines"]["spec"]["selector"]["matchLabels"].update(x="y"),
        "selects no pod",
    ),
    (  # three pods, of which two have a Router
        lambda t: t["PodDisruptionBudget/warmpath-routers"]["spec"].update(minAvailable=2),
        "minAvailable is 2 of 2 pods that are ready: none may ever be drained",
    ),
    (lambda t: group(t, 1).update(minReplicas=1), "minAvailable is 1 of 1 pods"),
    (
        lambda t: t["PodDisruptionBudget/warmpath-engines"]["spec"].update(minAvailable="50%"),
        "minAvailable must be a number",
    ),
]

UPGRADE: list[tuple[Break, str]] = [
    (
        lambda t: drop(t, "NetworkPolicy/everybody-to-gateway"),
        "nobody is let in to port 80 of the Gateway's pods",
    ),
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

GPU_CAPACITY: list[tuple[Break, str]] = [
    (lambda t: serve(t, "min_replicas: 2", "min_replicas: 0"), "min_replicas = 0: must be at least 1"),
    (lambda t: serve(t, "max_replicas: 8", "max_replicas: 9"), "9 replicas in full, places for 8"),
    (
        lambda t: serve(t, "max_surge_percent: 50", "max_surge_percent: 100"),
        "4 replicas in full, places for 3",
    ),
    (lambda t: serve(t, "num_gpus: 1", "num_gpus: 2"), "num_gpus = 2: must be 1"),
    (two_cards_each, "8 replicas in full, places for 0"),
    (
        lambda t: unscaled(t, 3),
        "places for 3: one asks for {'CPU': 1.0, 'GPU': 1, 'engine': 1}; engines 3 pods of",
    ),
    (
        lambda t: unscaled(t, 3),
        "; without enableInTreeAutoscaling (components/autoscaling) there are as many",
    ),
    (lambda t: drop(group(t, 1), "minReplicas"), "2 replicas at rest, places for 0"),
    (idle, "8 pods with GPUs are always there, 6 more than 2 replicas of Replica ever take"),
    (
        lambda t: group(t, 1).update(minReplicas=9, maxReplicas=16),
        "9 pods with GPUs are always there, 1 more",
    ),
    (
        lambda t: serve(t, "device: cuda\n", "device: cuda\n      host_cache_gib: 47.5\n"),
        "host_cache_gib is 47.5: 1 engine would keep 47.5 GiB beside 512.0 MiB of mounted memory; "
        "the container may use 48.0 GiB",
    ),
    (lambda t: serve(t, "num_gpus: 1", "num_gpus: 1\n      memory: 60000000000"), "places for 0"),
    (
        lambda t: (
            serve(t, "num_gpus: 1", "num_gpus: 1\n      memory: 40000000000"),
            group(t, 1)["rayStartParams"].update(memory="30000000000"),
        ),
        "places for 0",
    ),
    (lambda t: serve(t, "max_surge_percent: 50", "max_surge_percent: '100'"), "4 replicas in full"),
    (lambda t: serve(t, "engine: 1", "engine: '1'"), "resources.engine = '1': must be a number"),
]

GPU_REFERENCES: list[tuple[Break, str]] = [
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
]

SERVE_CONFIG: list[tuple[Break, str]] = [
    (lambda t: serve(t, "max_queued_requests", "max_queued_request"), "did you mean 'max_queued_requests'"),
    (lambda t: serve(t, "block_size: 16", "block_size: 0"), "block_size = 0: must be between"),
    (lambda t: serve(t, "num_blocks", "num_block"), "did you mean 'num_blocks'"),
    (lambda t: serve(t, "proxy_location: EveryNode", "proxy_location: ["), "serveConfigV2"),
    (lambda t: drop(t["RayService/warmpath"]["spec"], "serveConfigV2"), "serveConfigV2"),
]

HARDENING: list[tuple[Break, str]] = [
    (lambda t: drop(cluster(t), "authOptions"), "authOptions.mode must be token"),
    (lambda t: cluster(t)["authOptions"].update(mode="disabled"), "authOptions.mode must be token"),
    (lambda t: container(t, 1)["env"].pop(0), "env RAY_AUTH_MODE is None"),
    (
        lambda t: container(t, 1)["env"].append({"name": "A", "value": "b"}),
        "env differs between head and workers",
    ),
    (
        lambda t: container(t, 0)["env"].append({"name": ROUTER_VARIABLE, "value": "policy: random"}),
        "env WARMPATH_ROUTER: belongs into ray_actor_options.runtime_env.env_vars of Router",
    ),
    (lambda t: container(t, 1).update(image="warmpath"), "is not pinned"),
    (lambda t: container(t, 1).update(image="warmpath:latest"), "is not pinned"),
    (
        lambda t: container(t, 1)["securityContext"].update(readOnlyRootFilesystem=False),
        "readOnlyRootFilesystem",
    ),
    (
        lambda t: container(t, 1)["securityContext"].update(capabilities={"add": ["SYS_PTRACE"]}),
        "capabilities",
    ),
    (lambda t: worker(t, 1).update(automountServiceAccountToken=True), "automountServiceAccountToken"),
    (lambda t: worker(t, 1).update(hostNetwork=True), "hostNetwork must not be set"),
    (
        lambda t: worker(t, 1)["securityContext"].update(runAsUser=0),
        "engines: securityContext.runAsUser must",
    ),
    (
        lambda t: container(t, 1)["securityContext"].update(runAsUser=0),
        "ray-worker: securityContext.runAsUser",
    ),
    (
        lambda t: worker(t, 1).update(tolerations=[{"key": "karpenter.sh/disrupted", "operator": "Exists"}]),
        "on nodes that are being emptied",
    ),
    (lambda t: worker(t, 1).update(tolerations=[{"operator": "Exists"}]), "on nodes that are being emptied"),
    (lambda t: worker(t, 1)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}), "hostPath"),
    (lambda t: drop(t, "NetworkPolicy/deny-all"), "no NetworkPolicy closes it by default"),
    (lambda t: drop(t["NetworkPolicy/ray-to-ray"]["spec"]["ingress"][0], "from"), "opens every port"),
    (
        lambda t: drop(t["NetworkPolicy/namespace-to-serve"]["spec"]["ingress"][0], "from"),
        "open to everybody",
    ),
    (lambda t: worker(t, 0).update(terminationGracePeriodSeconds=140), "DRAIN_TIMEOUT_S is 140; should"),
    (lambda t: undrained(container(t, 0)), "DRAIN_TIMEOUT_S is 30; should be above"),
    (lambda t: drop(container(t, 0), "lifecycle"), "preStop must sleep"),
    (
        lambda t: t["RayService/warmpath"]["spec"].update(rayClusterDeletionDelaySeconds=60),
        "should be above 120",
    ),
    (lambda t: serve(t, "graceful_shutdown_timeout_s: 120", "graceful_shutdown_timeout_s: 300"), "above 300"),
    (lambda t: drop(container(t, 0), "livenessProbe"), "livenessProbe is missing"),
    (lambda t: cluster(t).update(rayVersion="2.40.0"), "rayVersion is 2.40.0"),
    (
        lambda t: group(t, 1)["rayStartParams"].update({"object-store-memory": "999999999"}),
        "object-store-memory",
    ),
    (lambda t: worker(t, 1)["volumes"][1].update(emptyDir={"sizeLimit": "1Gi"}), "of medium Memory"),
    (lambda t: container(t, 1)["resources"]["requests"].update(memory="1Gi"), "request and limit differ"),
    (lambda t: drop(container(t, 1)["resources"], "limits"), "needs a request and a limit"),
    (
        lambda t: t.update(
            s={"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "warmpath"}}
        ),
        "no Secret belongs into a manifest",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "debug_token: sixteen-characters"),
        "args.router.debug_token: no secret belongs into a manifest",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /tmp/t, key: sixteen-characters}"),
        "args.router.record.key: no secret belongs into a manifest",
    ),
]

CAPACITY: list[tuple[Break, str]] = [
    (
        lambda t: group(t, 1)["rayStartParams"].update(memory="40Gi"),
        "rayStartParams.memory is 40Gi; must be a number",
    ),
    (
        lambda t: group(t, 1)["rayStartParams"].update({"num-cpus": "all"}),
        "rayStartParams.num-cpus is all; must be a number",
    ),
    (
        lambda t: t["RayService/warmpath"]["spec"].update(serveConfigV2=""),
        "serveConfigV2: must be a mapping",
    ),
    (lambda t: serve(t, "num_replicas: 2", "num_replicas: 3"), "3 replicas at rest, places for 2"),
    (lambda t: serve(t, "num_replicas: 2", "num_replicas: auto"), "100 replicas in full, places for 2"),
    (
        lambda t: group(t, 0)["rayStartParams"].update(resources='"{\\"router\\": 1}"'),
        "2 replicas in full, places for 1",
    ),
    (
        lambda t: group(t, 0)["rayStartParams"].update(resources='{"router": 2}'),
        """rayStartParams.resources is {"router": 2}; must be JSON in quotes: '"{\\"engine\\": 1}"'""",
    ),
    (
        lambda t: group(t, 0)["rayStartParams"].update(resources='"2"'),
        'rayStartParams.resources is "2"; must',
    ),
    (lambda t: group(t, 1).update(suspend=True), "2 replicas at rest, places for 0"),
    (lambda t: serve(t, "engine: 1", "motor: 1"), "must ask for 'engine'"),
    (
        lambda t: group(t, 1)["rayStartParams"].update({"num-cpus": "8"}),
        "num-cpus is 8; the container may use 2",
    ),
    (
        lambda t: group(t, 1)["rayStartParams"].update({"num-gpus": "1"}),
        "num-gpus is 1; the container gets 0",
    ),
    (
        lambda t: serve(t, "torch_threads: 1", "torch_threads: 2"),
        "torch_threads is 2; 2 engines share 2 CPUs",
    ),
    (lambda t: serve(t, "device: cpu", "device: auto"), "device is auto; these pods are for cpu"),
]


@pytest.mark.parametrize(
    ("change", "words"), [*SCHEMA, *REFERENCES, *POLICIES, *SERVE_CONFIG, *HARDENING, *CAPACITY]
)
def test_mistake_in_the_demo_is_found(shipped: dict[str, Manifests], change: Break, words: str) -> None:
    told = findings(shipped["cpu-demo"], change)
    assert any(words in each for each in told), told


@pytest.mark.parametrize(("change", "words"), [*GPU_REFERENCES, *GPU_CAPACITY, *BUDGETS])
def test_mistake_in_the_cluster_for_availability_is_found(
    shipped: dict[str, Manifests], change: Break, words: str
) -> None:
    told = findings(shipped["ha"], change)
    assert any(words in each for each in told), told


@pytest.mark.parametrize("kind", ["Pod", "DaemonSet", "CronJob"])
def test_pods_of_whatever_makes_them_are_judged(shipped: dict[str, Manifests], kind: str) -> None:
    """Only those of Deployments, StatefulSets and Jobs were."""
    containers = [{"name": "x", "image": "x:1", "securityContext": {"privileged": True}}]
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": containers}}
    spec: dict[str, Any] = {"selector": {"matchLabels": {"a": "b"}}, "template": template}
    if kind == "Pod":
        spec = template["spec"]
    elif kind == "CronJob":
        template["spec"] |= {"restartPolicy": "Never"}
        spec = {"schedule": "0 4 * * *", "jobTemplate": {"spec": {"template": template}}}
    version = {"Pod": "v1", "DaemonSet": "apps/v1", "CronJob": "batch/v1"}[kind]
    metadata = {"name": "x", "namespace": "warmpath"}

    def added(things: dict[str, dict[str, Any]]) -> None:
        things["x"] = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    told = findings(shipped["ha"], added)
    assert any(each.startswith(f"x: {kind}/x: container x: securityContext.allowPriv") for each in told), told


@pytest.mark.parametrize(("change", "words"), UPGRADE)
def test_mistake_around_the_gateway_is_found(
    shipped: dict[str, Manifests], change: Break, words: str
) -> None:
    told = findings(shipped["upgrade"], change)
    assert any(words in each for each in told), told


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
    (lambda t: t["PodMonitor/warmpath-ray"]["spec"].update(podMetricsEndpoint=[]), "was unexpected"),
    (
        lambda t: t["PodMonitor/warmpath-ray"]["spec"]["podMetricsEndpoints"][0].update(port="ray"),
        "not every selected pod has it",
    ),
    (
        lambda t: t["PrometheusRule/warmpath"]["spec"]["groups"][0]["rules"][0].update(form="1m"),
        "'form' was unexpected",
    ),
]


@pytest.mark.parametrize(("change", "words"), MONITORING)
def test_mistake_in_monitoring_is_found(change: Break, words: str) -> None:
    told = findings(beside("gpu", PLACES["monitoring"].kept.read_text()), change)
    assert any(words in each for each in told), told


@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if place.beside is None])
def test_what_is_shipped_has_none(shipped: dict[str, Manifests], name: str) -> None:
    """So that each test above fails for its own mistake."""
    assert findings(shipped[name], lambda things: None) == []


def engines_in_reserve(things: dict[str, dict[str, Any]]) -> None:
    """A rolling update has a use for them."""
    unscaled(things, 3)
    two_replicas(things, max_surge_percent=50)


def one_group(things: dict[str, dict[str, Any]]) -> None:
    """Of four pods, each with a card, an engine and room for a Router, of which there are two."""
    routers, engines = cluster(things)["workerGroupSpecs"]
    engines["rayStartParams"] |= {"resources": '"{\\"engine\\": 1, \\"router\\": 1}"', "num-cpus": "2"}
    engines |= {"replicas": 4, "minReplicas": 4}
    theirs, ours = routers["template"]["spec"], engines["template"]["spec"]
    pairs = (("volumes", theirs, ours), ("volumeMounts", container(things, 0), container(things, 1)))
    for where, of_routers, of_engines in pairs:
        of_engines[where] += [each for each in of_routers[where] if each["name"] == "api-keys"]
    cluster(things)["workerGroupSpecs"] = [engines]


def several_hosts(things: dict[str, dict[str, Any]]) -> None:
    """KubeRay makes so many pods for each of the group."""
    unscaled(things, 2)
    group(things, 1).update(minReplicas=0, numOfHosts=4)


def headless(things: dict[str, dict[str, Any]]) -> None:
    things["Service/engines"] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "engines", "namespace": "warmpath"},
        "spec": {"clusterIP": "None", "selector": {"ray.io/group": "engines"}},
    }


def other_paths(things: dict[str, dict[str, Any]]) -> None:
    """Old ones that lead to those below the prefix, and an expression that takes both."""
    serve(things, "route_prefix: /", "route_prefix: /llm")
    redirected = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/llm/v1"}
    things["HTTPRoute/old"] = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "old", "namespace": "warmpath"},
        "spec": {
            "parentRefs": [{"name": "a-gateway"}],
            "rules": [
                {
                    "matches": [{"path": {"type": "RegularExpression", "value": "/(llm|old)/v1/.*"}}],
                    "backendRefs": [{"name": "warmpath-serve-svc", "port": 8000}],
                },
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "filters": [{"type": "RequestRedirect", "requestRedirect": {"path": redirected}}],
                },
            ],
        },
    }


def simulated(things: dict[str, dict[str, Any]]) -> None:
    """Which keeps nothing of blocks but their names."""
    serve(things, "device: cuda\n", "device: cuda\n      runner: simulated\n      host_cache_gib: 64\n")


@pytest.mark.parametrize("change", [one_group, several_hosts, headless, other_paths, simulated])
def test_what_is_meant_so_is_fine(shipped: dict[str, Manifests], change: Break) -> None:
    """Each was named as a mistake, or ended the check."""
    assert findings(shipped["gpu"], change) == []


@pytest.mark.parametrize(
    "change",
    [
        engines_in_reserve,
        lambda t: unscaled(t, 8),
        lambda t: serve(t, "num_gpus: 1", "num_gpus: '1'"),
        lambda t: serve(t, "max_surge_percent: 50", "max_surge_percent: '50'"),
        lambda t: serve(t, "max_replicas_per_node: 1", "max_replicas_per_node: '1'"),
        lambda t: serve(t, "device: cuda\n", "device: cuda\n      host_cache_gib: 40\n"),
        lambda t: serve(t, "num_gpus: 1", "num_gpus: 1\n      memory: 40000000000"),
        lambda t: serve(t, "route_prefix: /", "route_prefix: /llm"),
    ],
)
def test_what_fits_is_fine(shipped: dict[str, Manifests], change: Break) -> None:
    assert findings(shipped["ha"], change) == []


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


def parts_of_cards(things: dict[str, dict[str, Any]]) -> None:
    for amounts in container(things, 1)["resources"].values():
        amounts["nvidia.com/mig-3g.40gb"] = amounts.pop("nvidia.com/gpu")


def keys_from_the_environment(things: dict[str, dict[str, Any]]) -> None:
    serve(things, "keys_file: /etc/warmpath/keys.yaml", "keys_variable: KEYS")
    source = {"secretKeyRef": {"name": "warmpath-api-keys", "key": "keys.yaml"}}
    for each in (head(things)["containers"][0], container(things, 0), container(things, 1)):
        each["env"].append({"name": "KEYS", "valueFrom": source})


def redis_by_a_name_of_ours(things: dict[str, dict[str, Any]]) -> None:
    """The same without ports, as such a Service may be."""
    redis_elsewhere(things)
    del things["Service/warmpath-redis"]["spec"]["ports"]


def users_of_the_clusters_own(things: dict[str, dict[str, Any]]) -> None:
    for template in (head(things), worker(things, 0), worker(things, 1)):
        for key in ("runAsUser", "runAsGroup", "fsGroup"):
            drop(template["securityContext"], key)


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
        users_of_the_clusters_own,
        keys_from_the_environment,
        parts_of_cards,
        lambda t: container(t, 0).update(lifecycle={"preStop": {"sleep": {"seconds": 5}}}),
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
def test_what_places_have_otherwise_is_fine(shipped: dict[str, Manifests], change: Break) -> None:
    """Each was named as a mistake, or ended the check."""
    assert findings(shipped["ha"], change) == []


def test_a_managed_redis_that_is_a_service_here_is_still_looked_for(shipped: dict[str, Manifests]) -> None:
    def elsewhere(things: dict[str, dict[str, Any]]) -> None:
        cluster(things)["gcsFaultToleranceOptions"]["redisAddress"] = "redis.warmpath.svc.cluster.local:6379"

    (told,) = findings(shipped["ha"], elsewhere)
    assert "redisAddress: no Service and port are 'redis" in told


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            "monitoring/scrape-config.yaml",
            "metricsPath is /metrics; should be /llm/metrics, since route_prefix",
        ),
        ("examples/ingress.yaml", "path /v1 is outside route_prefix /llm"),
        ("examples/httproute.yaml", "path /v1 is outside route_prefix /llm"),
    ],
)
def test_what_asks_beside_the_prefix_of_all_paths_is_found(example: str, said: str) -> None:
    """Everything came up, and every scrape and request was a 404."""
    text = (ROOT / "k8s" / example).read_text().replace("kind: ScrapeConfig\nmetadata:\n", SCRAPES)
    prefixed = partial(serve, before="route_prefix: /", after="route_prefix: /llm")
    told = findings(beside("gpu", text), prefixed)
    assert [said in each for each in told] == [True]
    for path in ("/metrics", "/v1"):
        text = text.replace(f": {path}\n", f": /llm{path}\n")
    assert findings(beside("gpu", text), prefixed) == []


def test_overlays_have_one_prefix_since_they_share_what_asks_them(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("applications: [{name: warmpath, route_prefix: /llm}]")
    other = Place("other", (str(settings),))
    (found,) = prefix_findings([PLACES["cpu-demo"], PLACES["monitoring"], other])
    assert str(found).endswith("share k8s/monitoring and k8s/examples: / in cpu-demo; /llm in other")
    assert list(prefix_findings([other, replace(other, name="another")])) == []


def test_a_recording_below_tmp_is_fine(shipped: dict[str, Manifests]) -> None:
    def record(things: dict[str, dict[str, Any]]) -> None:
        serve(things, "expose_routing: false", "record: {folder: /tmp/traces}")

    assert findings(shipped["ha"], record) == []


@pytest.mark.parametrize(
    ("text", "value"), [("500m", "0.5"), ("2", "2"), (4, "4"), ("1Gi", str(2**30)), ("5M", "5000000")]
)
def test_quantities(text: str | int, value: str) -> None:
    assert str(quantity(text).normalize()) in {value, f"{quantity(value).normalize()}"}


@pytest.mark.parametrize("text", ["", "Gi", "5Zi", "two"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)
