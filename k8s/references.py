"""What manifests say of one another: names, labels, ports, mounts, secrets, and the Serve config inside.

Every reference must lead somewhere. A selector that matches nothing and a Secret nobody makes are accepted
by an API server and found out in the night.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from deploy.config import AppConfig
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
from k8s.ray_groups import given_labels
from router.config import RecordConfig

NAMESPACE = "warmpath"
CLUSTER_SCOPED = frozenset({"Namespace", "PriorityClass"})
AGENT_PORT = 52365  # Ray's dashboard agent in every pod: answers probes
FREE_PORTS = frozenset({AGENT_PORT})
TINY = "tiny"  # the model that is built where it is used: replica/models/tiny_model.py

SECRETS: Mapping[str, frozenset[str]] = {
    "warmpath-api-keys": frozenset({"keys.yaml", "secret"}),
    "warmpath-redis": frozenset({"password"}),
    "warmpath-scrape-key": frozenset({"key"}),
}
"""Secrets that an operator makes, with their keys; docs/kubernetes.md says how. None is in a manifest."""

CLUSTERS_OWN_CONFIG_MAPS = frozenset({"kube-root-ca.crt"})
WRITABLE_VOLUMES = frozenset({"emptyDir", "ephemeral", "persistentVolumeClaim"})
KUBERAY_SELECTS_BY = frozenset({"app.kubernetes.io/name", "app.kubernetes.io/created-by"})


def reference_findings(where: str, manifests: Manifests, config: ServeFile | None) -> Iterator[Finding]:
    """config: the Serve config inside, if it could be read."""
    yield from _names(where, manifests)
    for pod in manifests.pods():
        yield from _pod(where, manifests, pod)
    yield from _selectors(where, manifests)
    yield from _services(where, manifests)
    for service in manifests.of_kind(RAY_SERVICE):
        yield from _redis(where, manifests, service)
        yield from _backends(where, manifests, service)
        if config is not None:
            yield from _config(where, manifests, config)


def _names(where: str, manifests: Manifests) -> Iterator[Finding]:
    seen = set()
    for each in manifests.objects:
        if named(each) in seen:
            yield Finding(where, named(each), "is there twice")
        seen.add(named(each))
        namespace = each["metadata"].get("namespace")
        if each["kind"] in CLUSTER_SCOPED:
            continue
        if namespace != NAMESPACE:
            yield Finding(where, named(each), f"metadata.namespace is {namespace}; should be {NAMESPACE}")


def _pod(where: str, manifests: Manifests, pod: Pod) -> Iterator[Finding]:
    for message in (
        *_named_objects(manifests, pod),
        *_mounts(manifests, pod),
        *_volumes(manifests, pod),
        *_containers(pod),
        *_labels(pod),
    ):
        yield Finding(where, pod.owner, message)


def _named_objects(manifests: Manifests, pod: Pod) -> Iterator[str]:
    for key, kind in (("serviceAccountName", "ServiceAccount"), ("priorityClassName", "PriorityClass")):
        if not manifests.has(kind, pod.spec.get(key, "")):
            yield f"{key}: no {kind} is called {pod.spec.get(key)!r}"


def _mounts(manifests: Manifests, pod: Pod) -> Iterator[str]:
    templates = {
        claim["metadata"]["name"]
        for each in manifests.of_kind("StatefulSet")
        if named(each) == pod.owner
        for claim in each["spec"].get("volumeClaimTemplates", ())
    }
    mounted = {mount["name"] for mount in pod_mounts(manifests, pod)}
    for name in sorted(mounted - pod.volumes.keys() - templates):
        yield f"volumeMounts: no volume is called {name!r}"
    for name in sorted(pod.volumes.keys() - mounted):
        yield f"volumes: nobody mounts {name!r}"


def _volumes(manifests: Manifests, pod: Pod) -> Iterator[str]:
    """What volumes are made of: claims, Secrets and ConfigMaps."""
    for name, volume in pod.volumes.items():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and not manifests.has("PersistentVolumeClaim", claim):
            yield f"volume {name}: no PersistentVolumeClaim is called {claim!r}"
        if "secret" in volume:
            keys = [item["key"] for item in volume["secret"].get("items", ())]
            yield from _secret(volume["secret"]["secretName"], keys)
        for source in (volume, *volume.get("projected", {}).get("sources", ())):
            config_map = source.get("configMap", {}).get("name")
            if config_map is not None and config_map not in CLUSTERS_OWN_CONFIG_MAPS:
                if not manifests.has("ConfigMap", config_map):
                    yield f"volume {name}: no ConfigMap is called {config_map!r}"


def _containers(pod: Pod) -> Iterator[str]:
    for container in (*pod.spec.get("initContainers", ()), *pod.spec["containers"]):
        yield from _environment(container)
        yield from _probes(pod, container)


def _environment(container: Mapping[str, Any]) -> Iterator[str]:
    variables = container.get("env", ())
    names = [each["name"] for each in variables]
    for name in sorted({each for each in names if names.count(each) > 1}):
        yield f"env {name} is set twice"
    for variable in variables:
        source = variable.get("valueFrom", {}).get("secretKeyRef")
        if source is not None:
            yield from _secret(source["name"], [source["key"]])


def _probes(pod: Pod, container: Mapping[str, Any]) -> Iterator[str]:
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        action = container.get(probe, {})
        port = (action.get("httpGet") or action.get("tcpSocket") or {}).get("port")
        if port is not None and port not in FREE_PORTS and not pod.has_port(port):
            yield f"{probe}: no container port is {port!r}"


def _labels(pod: Pod) -> Iterator[str]:
    """The pod's own, and what selects by them."""
    if pod.is_ray:
        for label in sorted(KUBERAY_SELECTS_BY & given_labels(pod.ray_group).keys()):
            yield f"label {label}: the head's Service selects by KubeRay's own value of it"
    for constraint in pod.spec.get("topologySpreadConstraints", ()):
        if not selects(constraint.get("labelSelector", {}), pod.labels):
            yield "topologySpreadConstraints: labelSelector does not match the pod itself"


def pod_mounts(manifests: Manifests, pod: Pod) -> list[Mapping[str, Any]]:
    """Every container's mounts; the autoscaler's too, which KubeRay adds to the head."""
    found = [mount for each in pod.spec.get("initContainers", ()) for mount in each.get("volumeMounts", ())]
    found += [mount for each in pod.spec["containers"] for mount in each.get("volumeMounts", ())]
    if pod.is_head:
        for service in manifests.of_kind(RAY_SERVICE):
            found += service["spec"]["rayClusterConfig"].get("autoscalerOptions", {}).get("volumeMounts", ())
    return found


def _secret(name: str, keys: list[str]) -> Iterator[str]:
    if name not in SECRETS:
        yield f"no Secret {name!r} is known; operators make {', '.join(sorted(SECRETS))}"
        return
    for key in keys:
        if key not in SECRETS[name]:
            yield f"Secret {name} has no key {key!r}; it has {', '.join(sorted(SECRETS[name]))}"


def _selectors(where: str, manifests: Manifests) -> Iterator[Finding]:
    """Of budgets, policies and monitors: each selects pods, and those have the ports that it names."""
    pods = manifests.pods()
    for each in manifests.of_kind("PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = each["spec"]
        selector = spec.get("podSelector", spec.get("selector", {}))
        selected = [pod for pod in pods if selects(selector, pod.labels)]
        has_gateways = any(selects(selector, labels) for labels in _gateways(manifests))
        if not selected and not has_gateways:
            yield Finding(where, named(each), f"selects no pod: {dict(selector)}")
            continue
        for rule in spec.get("ingress", ()):
            for message in (*_opened(rule, selected, has_gateways=has_gateways), *_let_in(rule, pods)):
                yield Finding(where, named(each), message)
        for endpoint in spec.get("podMetricsEndpoints", ()):
            port = endpoint.get("port", endpoint.get("portNumber", endpoint.get("targetPort")))
            if not all(pod.has_port(port) for pod in selected):
                yield Finding(where, named(each), f"port {port}: not every selected pod has it")


def _opened(rule: Mapping[str, Any], selected: Sequence[Pod], *, has_gateways: bool) -> Iterator[str]:
    """has_gateways: pods of a Gateway, whose ports nobody here writes down, are selected as well."""
    for port in [entry["port"] for entry in rule.get("ports", ()) if "port" in entry]:
        is_gateways = has_gateways and port == GATEWAY_PORT
        if not is_gateways and not any(pod.has_port(port) for pod in selected):
            yield f"port {port}: no selected pod has it"


def _let_in(rule: Mapping[str, Any], pods: Sequence[Pod]) -> Iterator[str]:
    """Of other namespaces nobody here knows the pods."""
    for peer in rule.get("from", ()):
        if "namespaceSelector" in peer:
            continue
        if not any(selects(peer.get("podSelector", {}), pod.labels) for pod in pods):
            yield f"lets nobody in: {dict(peer['podSelector'])}"


def _gateways(manifests: Manifests) -> Iterator[dict[str, str]]:
    """Labels of pods that nobody here writes down: those behind the operator's Gateways."""
    for service in manifests.of_kind(RAY_SERVICE):
        labels = gateway_labels(service)
        if labels is not None:
            yield labels


def _services(where: str, manifests: Manifests) -> Iterator[Finding]:
    for each in manifests.of_kind("Service"):
        if "selector" not in each["spec"]:  # it leads to somewhere else
            continue
        selected = [
            pod for pod in manifests.pods() if selects({"matchLabels": each["spec"]["selector"]}, pod.labels)
        ]
        if not selected:
            yield Finding(where, named(each), f"selects no pod: {each['spec']['selector']}")
        for port in each["spec"].get("ports", ()):
            target = port.get("targetPort", port["port"])
            if not all(pod.has_port(target) for pod in selected):
                yield Finding(where, named(each), f"targetPort {target!r}: no container port is called so")


def _backends(where: str, manifests: Manifests, service: Mapping[str, Any]) -> Iterator[Finding]:
    """Requests go to the Service that KubeRay makes: its name, and the head's port `serve`."""
    name = f"{service['metadata']['name']}-serve-svc"
    head = next(pod for pod in manifests.pods() if pod.is_head)
    ports = ("serve", head.ports.get("serve"))
    ours = {each["metadata"]["name"] for each in manifests.of_kind("Service")}
    for each in manifests.of_kind("Ingress", "HTTPRoute", "ScrapeConfig"):
        is_scrape = each["kind"] == "ScrapeConfig"
        for backend, port in _targets(each):
            if is_scrape and backend not in ours:
                # KubeRay's own has another name for each cluster where upgrades are incremental.
                yield Finding(where, named(each), f"scrapes {backend}, which is none of {sorted(ours)}")
            elif not is_scrape and backend != name:
                yield Finding(where, named(each), f"sends to {backend}; the RayService's Service is {name}")
            elif port not in ports:
                yield Finding(
                    where, named(each), f"sends to port {port!r} of {name}; should be one of {ports}"
                )
        credentials = each["spec"].get("authorization", {}).get("credentials")
        if credentials is not None:
            for message in _secret(credentials["name"], [credentials["key"]]):
                yield Finding(where, named(each), message)


def _targets(thing: Mapping[str, Any]) -> Iterator[tuple[str, str | int]]:
    """Service and port of everything that this object sends to."""
    spec = thing["spec"]
    for static in spec.get("staticConfigs", ()):
        for target in static["targets"]:
            host, _, port = target.partition(":")
            yield _service_name(host), int(port)
    for rule in spec.get("rules", ()):
        for backend in rule.get("backendRefs", ()):
            yield backend["name"], backend["port"]
        for path in rule.get("http", {}).get("paths", ()):
            port = path["backend"]["service"]["port"]
            yield path["backend"]["service"]["name"], port.get("name", port.get("number"))


def _service_name(host: str) -> str:
    """Of a Service of this namespace, by whichever of its names; any other host keeps a dot in it."""
    return host.removesuffix(".cluster.local").removesuffix(".svc").removesuffix(f".{NAMESPACE}")


def _redis(where: str, manifests: Manifests, service: Mapping[str, Any]) -> Iterator[Finding]:
    options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
    address = options.get("redisAddress")
    if address is None:
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    name = _service_name(host)
    specs = [each["spec"] for each in manifests.of_kind("Service") if each["metadata"]["name"] == name]
    ports = [str(entry["port"]) for spec in specs for entry in spec.get("ports", ())]
    is_elsewhere = "." in name or any("externalName" in spec for spec in specs)  # a managed one
    if not is_elsewhere and port not in ports:
        yield Finding(where, named(service), f"redisAddress: no Service and port are {address!r}")
    source = options.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef")
    if source is None:
        yield Finding(where, named(service), "redisPassword: must come from a Secret")
    else:
        for message in _secret(source["name"], [source["key"]]):
            yield Finding(where, named(service), message)


def _config(where: str, manifests: Manifests, config: ServeFile) -> Iterator[Finding]:
    """The Serve config's port, model and files, as its pods would find them."""
    for pod in manifests.pods():
        if pod.is_ray:
            of_routers = _router_settings(pod, config.app) if pod.slots.get("router") else ()
            for message in (*_port(pod, config.port), *_model(pod, config.app.replica.model), *of_routers):
                yield Finding(where, pod.owner, message)


def _port(pod: Pod, port: int) -> Iterator[str]:
    if pod.ports.get("serve") != port:
        yield f"container port serve is {pod.ports.get('serve')}; http_options.port is {port}"


def _model(pod: Pod, model: str) -> Iterator[str]:
    """Every pod has it: the head builds the application from its config."""
    if model.startswith("/"):
        if not _mounted(pod, model):
            yield f"args.replica.model is {model}, which no volume holds"
        elif pod.is_head and model not in _waits_for(pod):
            # A build that fails is final: Serve tries none again, and KubeRay sends a config once.
            yield f"no init container with MODEL={model} waits for args.replica.model"
    elif model != TINY and pod.environment.get("HF_HUB_OFFLINE") == "1":
        yield f"args.replica.model is {model}, which HF_HUB_OFFLINE forbids to fetch: name a mounted folder"


def _router_settings(pod: Pod, app: AppConfig) -> Iterator[str]:
    """Files and variables that a Router reads when it starts."""
    tenants, record = app.tenants, app.router_sketch().record
    files = [("tenants", tenants.keys_file), ("tenants", tenants.secret_file)]
    files += [("record", record.key_file)] if record is not None else []
    for section, path in files:
        if path is not None and not _mounted(pod, path):
            yield f"args.router.{section} names {path}, which no volume holds"
    variables = {"keys_variable": tenants.keys_variable, "secret_variable": tenants.secret_variable}
    for name, variable in variables.items():
        # What envFrom brings nobody here knows.
        if variable is not None and "envFrom" not in pod.main and variable not in pod.environment:
            yield f"args.router.tenants.{name} is {variable}, which the container's env does not set"
    if record is not None:
        for message in _recording(pod, record):
            yield f"args.router.record.{message}"


def _waits_for(pod: Pod) -> set[str]:
    """Models that init containers wait for."""
    containers = pod.spec.get("initContainers", ())
    variables = [each for one in containers for each in one.get("env", ()) if each["name"] == "MODEL"]
    return {each["value"] for each in variables if "value" in each}


def _recording(pod: Pod, record: RecordConfig) -> Iterator[str]:
    """A Router that cannot write its recording does not start, and a pod whose emptyDir grows too large is
    evicted."""
    mounts = [
        mount
        for mount in pod.main.get("volumeMounts", ())
        if PurePosixPath(record.folder).is_relative_to(mount["mountPath"])
    ]
    if not mounts:
        yield f"folder is {record.folder}, which no volume holds: the root file system cannot be written to"
        return
    mount = max(mounts, key=lambda each: len(PurePosixPath(each["mountPath"]).parts))  # the innermost counts
    volume = pod.volumes.get(mount["name"], {})
    claim = volume.get("persistentVolumeClaim", {})
    if mount.get("readOnly") or claim.get("readOnly") or not volume.keys() & WRITABLE_VOLUMES:
        yield f"folder is {record.folder}, and volume {mount['name']} there cannot be written to"
    limit = volume.get("emptyDir", {}).get("sizeLimit")
    if limit is not None and record.max_total_bytes > quantity(limit) // 2:
        yield (
            f"max_total_bytes is {record.max_total_bytes}; should be at most half of volume "
            f"{mount['name']}, which has {limit}"
        )


def _mounted(pod: Pod, path: str) -> bool:
    """Whether a volume of this pod holds the path; a Secret's must list the file."""
    for mount in pod.main.get("volumeMounts", ()):
        volume = pod.volumes.get(mount["name"], {})
        if not PurePosixPath(path).is_relative_to(mount["mountPath"]) or "emptyDir" in volume:
            continue
        if "secret" not in volume:
            return True
        inside = str(PurePosixPath(path).relative_to(mount["mountPath"]))
        if inside in [item["path"] for item in volume["secret"].get("items", ())]:
            return True
    return False
