"""What every pod and policy must be, whoever edits them: restricted, closed, behind a token, patient.

The rules of Kubernetes' "restricted" standard and those of docs/security.md. Judges one overlay's objects
alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from deploy.router_variable import ROUTER_VARIABLE
from deploy.serve_file import ServeFile
from k8s.findings import Finding
from k8s.manifests import (
    GATEWAY_PORT,
    RAY_SERVICE,
    Manifests,
    Pod,
    gateway_labels,
    named,
    selects,
)
from k8s.quantities import quantity
from k8s.shapes import DRAIN_VARIABLE, HARD_STOP_VARIABLE

SERVING_PORT = 8000
OPEN_PORTS = frozenset({SERVING_PORT, 8080, 8265, 6379})  # 6379: of Redis, to Ray pods
REQUIRED_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

LEAVING_TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",  # before Karpenter 1.0
        "ToBeDeletedByClusterAutoscaler",
        "node.kubernetes.io/unschedulable",
        "node.kubernetes.io/out-of-service",
    }
)
"""Of nodes that are being emptied. Who tolerates them is placed there anew; Karpenter never drains it."""

_SECONDS = re.compile(r"\d+(\.\d+)?s?$")
RAY_DRAIN_S = 30.0  # Ray's default, in 2.60


def hardening_findings(where: str, manifests: Manifests, config: ServeFile | None) -> Iterator[Finding]:
    """Of each object alone. config: the Serve config inside, if it could be read."""
    for pod in manifests.pods():
        for message in (*_pod(pod), *(_ray_pod(pod) if pod.is_ray else ())):
            yield Finding(where, pod.owner, message)
    for service in manifests.of_kind(RAY_SERVICE):
        for message in (*_cluster(manifests, service), *_patience(manifests, service, config)):
            yield Finding(where, named(service), message)
    for each in manifests.of_kind("Secret"):
        yield Finding(where, named(each), "no Secret belongs into a manifest")
    if config is not None:
        for message in _secrets(config):
            yield Finding(where, "RayService/serveConfigV2", message)


def _secrets(config: ServeFile) -> Iterator[str]:
    """A RayService is no Secret: whoever may look at it reads its config."""
    router = config.app.router_sketch()
    if router.debug_token is not None:
        yield "args.router.debug_token: no secret belongs into a manifest; use API keys (components/api-keys)"
    if router.record is not None and router.record.key is not None:
        yield "args.router.record.key: no secret belongs into a manifest; key_file names a mounted one"


def _pod(pod: Pod) -> Iterator[str]:
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(key):
            yield f"{key} must not be set"
    # None where the cluster gives each namespace users of its own, as OpenShift does.
    if pod.spec.get("securityContext", {}).get("runAsUser") == 0:
        yield "securityContext.runAsUser must be a user other than root"
    for toleration in pod.spec.get("tolerations", ()):
        if toleration.get("key") is None or toleration["key"] in LEAVING_TAINTS:
            yield f"toleration {toleration}: keeps the pod on nodes that are being emptied, undrained"
    for container in (*pod.spec.get("initContainers", ()), *pod.spec["containers"]):
        for message in container_messages(container):
            yield f"container {container['name']}: {message}"
    for volume in pod.spec.get("volumes", ()):
        if "hostPath" in volume:
            yield f"volume {volume['name']}: hostPath is not allowed"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']}: emptyDir needs a sizeLimit"


def container_messages(container: Mapping[str, Any]) -> Iterator[str]:
    """What the restricted standard and we ask of one container."""
    security = container.get("securityContext", {})
    expected = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for key, value in expected.items():
        if security.get(key) != value:
            yield f"securityContext.{key} is {security.get(key)}; should be {value}"
    if security.get("runAsUser") == 0:
        yield "securityContext.runAsUser must be a user other than root"
    image = container.get("image")
    if image is not None and (":" not in image.rpartition("/")[2] or image.endswith(":latest")):
        yield f"image {image} is not pinned to a version"
    resources = container.get("resources", {})
    for name in ("cpu", "memory"):
        if not all(name in resources.get(kind, {}) for kind in ("requests", "limits")):
            yield f"resources: {name} needs a request and a limit"
    memory = {resources.get(kind, {}).get("memory") for kind in ("requests", "limits")}
    if len(memory) > 1:
        yield "resources: memory's request and limit differ: the node would kill it when others want theirs"
    ports = [port["containerPort"] for port in container.get("ports", ())]
    for port in sorted({each for each in ports if ports.count(each) > 1}):
        yield f"container port {port} is there twice"


def _ray_pod(pod: Pod) -> Iterator[str]:
    environment = pod.environment
    for name, value in REQUIRED_ENVIRONMENT.items():
        if environment.get(name) != value:
            yield f"env {name} is {environment.get(name)!r}; should be {value!r}"
    if ROUTER_VARIABLE in environment:
        yield (
            f"env {ROUTER_VARIABLE}: belongs into ray_actor_options.runtime_env.env_vars of Router, where it "
            "is checked, and where a change replaces Routers alone and not the cluster"
        )
    for probe in ("livenessProbe", "readinessProbe"):
        if probe not in pod.main:
            yield f"{probe} is missing: KubeRay's own needs wget, which the image has not"
    shared = [mount for mount in pod.main.get("volumeMounts", ()) if mount["mountPath"] == "/dev/shm"]
    memory = pod.volumes.get(shared[0]["name"], {}).get("emptyDir", {}) if shared else {}
    if memory.get("medium") != "Memory" or "sizeLimit" not in memory:
        yield "/dev/shm must be an emptyDir of medium Memory with a sizeLimit"
        return
    store = int(pod.number_given("object-store-memory"))
    size = quantity(memory["sizeLimit"])
    if not 0 < store < size:
        yield f"object-store-memory is {store}; should be above 0 and below /dev/shm's {size} bytes"
    if 2 * size > pod.memory_bytes:
        yield f"/dev/shm may take {size} of the container's {pod.memory_bytes} bytes; half at most"


def _cluster(manifests: Manifests, service: Mapping[str, Any]) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "rayClusterConfig.authOptions.mode must be token: Ray's gRPC ports unpickle what they are sent"
    if cluster.get("rayVersion") != version("ray"):
        yield f"rayVersion is {cluster.get('rayVersion')}; the project is tested with {version('ray')}"
    pods = [pod for pod in manifests.pods() if pod.is_ray]
    if any(pod.slots["CPU"] for pod in pods if pod.is_head):
        yield "headGroupSpec: num-cpus must be 0: no work on the pod that all depend on"
    if len({str(pod.main.get("env")) for pod in pods}) > 1:
        yield "env differs between head and workers: proxies and replicas would not understand each other"
    if len({pod.main.get("image") for pod in pods}) > 1:
        yield "image differs between head and workers"
    autoscaler = cluster.get("autoscalerOptions")
    if cluster.get("enableInTreeAutoscaling"):
        if autoscaler is None:
            yield "autoscalerOptions are missing: KubeRay's own container is not restricted"
        else:
            for message in container_messages(autoscaler):
                yield f"autoscalerOptions: {message}"


def _patience(manifests: Manifests, service: Mapping[str, Any], config: ServeFile | None) -> Iterator[str]:
    """Longest answer < Ray's drain; preStop + drain < grace period; an old cluster outlives its answers."""
    if config is None:
        return
    answer_s = max(
        float(config.options(name).get("graceful_shutdown_timeout_s", 20)) for name in ("Router", "Replica")
    )
    for pod in manifests.pods():
        if not pod.is_ray or pod.is_head:
            continue
        waits_s = _slept_s(pod.main.get("lifecycle", {}).get("preStop", {}))
        if not waits_s:
            yield f"{pod.group}: preStop must sleep until the Service has forgotten the pod"
        environment = pod.environment
        drain_s = float(environment.get(DRAIN_VARIABLE) or RAY_DRAIN_S)
        grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        if not answer_s < drain_s < grace_s - waits_s:
            yield (
                f"{pod.group}: {DRAIN_VARIABLE} is {drain_s:g}; should be above graceful_shutdown_timeout_s "
                f"({answer_s:g}), and {waits_s:g} s (preStop) below terminationGracePeriodSeconds ({grace_s})"
            )
        reload_s = float(environment.get(HARD_STOP_VARIABLE) or 0)
        if reload_s <= answer_s:
            yield f"{pod.group}: {HARD_STOP_VARIABLE} must be above {answer_s:g}"
    delay_s = service["spec"].get("rayClusterDeletionDelaySeconds", 60)
    if delay_s <= answer_s:
        yield f"rayClusterDeletionDelaySeconds is {delay_s}; should be above {answer_s:g}"


def _slept_s(handler: Mapping[str, Any]) -> float:
    """By the command or, since Kubernetes 1.30, by the kubelet itself."""
    match handler:
        case {"exec": {"command": ["sleep", str(seconds)]}} if _SECONDS.match(seconds):
            return float(seconds.removesuffix("s"))
        case {"sleep": {"seconds": seconds}}:
            return float(seconds)
    return 0.0


def policy_findings(where: str, manifests: Manifests, config: ServeFile | None) -> Iterator[Finding]:
    """Every pod is closed by default; only Ray pods reach all ports of Ray pods; keys before an open port."""
    policies = manifests.of_kind("NetworkPolicy")
    if not any(_closes_all(each["spec"]) for each in policies):
        for pod in manifests.pods():
            yield Finding(where, pod.owner, "no NetworkPolicy closes it by default")
    has_keys = config is not None and config.app.tenants.has_keys
    gateways = [gateway_labels(each) for each in manifests.of_kind(RAY_SERVICE)]
    gateway = next((labels for labels in gateways if labels is not None), None)
    if gateway is not None and not any(_opens(each, gateway, GATEWAY_PORT) for each in policies):
        yield Finding(
            where, "NetworkPolicy", f"nobody is let in to port {GATEWAY_PORT} of the Gateway's pods"
        )
    by_name = {name: port for pod in manifests.pods() for name, port in pod.ports.items()}
    for each in policies:
        is_gateway = gateway is not None and each["spec"]["podSelector"].get("matchLabels") == gateway
        entrance = GATEWAY_PORT if is_gateway else SERVING_PORT
        for rule in each["spec"].get("ingress", ()):
            for message in _rule(rule, _opened(rule, by_name), entrance, has_keys=has_keys):
                yield Finding(where, named(each), message)


def _closes_all(spec: Mapping[str, Any]) -> bool:
    """Whether a policy lets nothing into any pod of the namespace."""
    is_for_all = spec["podSelector"] == {} and "Ingress" in spec.get("policyTypes", ["Ingress"])
    return is_for_all and not spec.get("ingress")


def _rule(rule: Mapping[str, Any], ports: set[int] | None, entrance: int, *, has_keys: bool) -> Iterator[str]:
    """ports: that this rule of ingress lets through, None: every one. entrance: clients' port."""
    peers = rule.get("from", [])
    if ports is None and not (peers and all(_is_ray(peer) for peer in peers)):
        yield "opens every port, and not to Ray pods alone"
    if beyond := sorted((ports or set()) - OPEN_PORTS - {entrance}):
        is_few = len(beyond) < 10
        yield f"opens {beyond if is_few else f'{len(beyond)} ports, {beyond[0]} to {beyond[-1]}'}"
    is_open = not peers or any(map(_is_everybody, peers))
    if is_open and not (has_keys and ports == {entrance}):
        yield "is open to everybody: only the serving port may be, with API keys"


def _opened(rule: Mapping[str, Any], by_name: Mapping[str, int]) -> set[int] | None:
    """Ports that a rule of ingress lets through; None: every one. by_name: containers'."""
    entries = rule.get("ports", ())
    if not entries or any("port" not in each for each in entries):
        return None
    ports: set[int] = set()
    for each in entries:
        first = by_name.get(each["port"], each["port"])
        if isinstance(first, int):  # a name that no container has opens nothing
            ports |= set(range(first, each.get("endPort", first) + 1))
    return ports


def _is_everybody(peer: Mapping[str, Any]) -> bool:
    """Of the world, or of the cluster."""
    if "ipBlock" in peer:
        return str(peer["ipBlock"].get("cidr")).endswith("/0")
    return peer.get("namespaceSelector") == {} and not peer.get("podSelector")


def _opens(policy: Mapping[str, Any], labels: Mapping[str, str], port: int) -> bool:
    opened = [_opened(rule, {}) for rule in policy["spec"].get("ingress", ())]
    is_open = any(ports is None or port in ports for ports in opened)
    return is_open and selects(policy["spec"]["podSelector"], labels)


def _is_ray(peer: Mapping[str, Any]) -> bool:
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    return "namespaceSelector" not in peer and labels.get("ray.io/is-ray-node") == "yes"
