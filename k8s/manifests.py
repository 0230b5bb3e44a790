"""The objects of one overlay, and the pods they would become.

Knows which labels KubeRay puts on a pod itself, since selectors rely on them. Judges nothing.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from k8s.documents import documents
from k8s.quantities import quantity
from k8s.ray_groups import HEAD_GROUP, numbers_of_pods, pod_labels, start_params

RAY_SERVICE = "RayService"
WORKLOADS = ("Pod", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job", "CronJob")
GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"
MOST = 1e18  # of any resource
NUMBERS_GIVEN = ("num-cpus", "num-gpus", "memory", "object-store-memory")  # to `ray start`
GATEWAY_PORT = 80  # of the listener that KubeRay gives the Gateway it makes
_NUMBER = re.compile(r"\d{1,18}(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod template, as its controller would label it."""

    owner: str  # Kind/name
    group: str  # KubeRay's group; the workload's name elsewhere
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    ray_group: Mapping[str, Any]  # of the RayCluster; empty where no Ray runs
    min_pods: int
    max_pods: int

    @property
    def main(self) -> Mapping[str, Any]:
        """The first container: Ray's, in Ray's pods."""
        container: Mapping[str, Any] = self.spec["containers"][0]
        return container

    @property
    def is_ray(self) -> bool:
        return bool(self.ray_group)

    @property
    def is_head(self) -> bool:
        return self.group == HEAD_GROUP

    @property
    def ports(self) -> dict[str, int]:
        """Every container's named ports."""
        found = {}
        for container in self.spec["containers"]:
            for port in container.get("ports", ()):
                found[port.get("name", str(port["containerPort"]))] = port["containerPort"]
        return found

    def has_port(self, port: str | int | None) -> bool:
        """Whether a container's port is called so, or has this number."""
        return port in {*self.ports, *self.ports.values()}

    @property
    def volumes(self) -> dict[str, Mapping[str, Any]]:
        """Each by its name."""
        return {volume["name"]: volume for volume in self.spec.get("volumes", ())}

    @property
    def environment(self) -> dict[str, str | None]:
        """The first container's, None for what comes from elsewhere."""
        return {each["name"]: each.get("value") for each in self.main.get("env", ())}

    @property
    def limits(self) -> Mapping[str, str | int]:
        """Of the first container, as they are written."""
        limits: Mapping[str, str | int] = self.main.get("resources", {}).get("limits", {})
        return limits

    @property
    def num_cpus(self) -> float:
        """Cores that the first container may use, 0 without a limit."""
        return float(quantity(self.limits.get("cpu", 0)))

    @property
    def num_gpus(self) -> int:
        """NVIDIA cards that the first container gets; a part of one (MIG) is a card to it."""
        return sum(
            int(quantity(number))
            for name, number in self.limits.items()
            if name == "nvidia.com/gpu" or name.startswith("nvidia.com/mig-")
        )

    @property
    def memory_bytes(self) -> int:
        """The first container's limit, 0 without one; Ray offers all of it where its options do not say."""
        return int(quantity(self.limits.get("memory", 0)))

    @property
    def shared_bytes(self) -> int:
        """What the first container may put into memory that is mounted: it counts towards its limit."""
        mounted = {mount["name"] for mount in self.main.get("volumeMounts", ())}
        folders = [each.get("emptyDir", {}) for name, each in self.volumes.items() if name in mounted]
        return sum(
            int(quantity(each.get("sizeLimit", 0))) for each in folders if each.get("medium") == "Memory"
        )

    @property
    def ray_params(self) -> Mapping[str, str]:
        """`ray start` options; empty where no Ray runs."""
        return start_params(self.ray_group)

    @property
    def slots(self) -> dict[str, float]:
        """Ray's resources of one such pod: CPU, GPU and custom ones. KubeRay adds the container's where no
        option says how many."""
        requests = self.main.get("resources", {}).get("requests", {})
        cpus = math.ceil(self.num_cpus or quantity(requests.get("cpu", 0)))
        found = {
            "CPU": self.number_given("num-cpus", cpus),
            "GPU": self.number_given("num-gpus", self.num_gpus),
        }
        return found | (self.named_slots or {})

    def number_given(self, name: str, default: float = 0.0) -> float:
        """A number among the `ray start` options; `default` also where it is none (`no_numbers`)."""
        return default if name in self.no_numbers else float(self.ray_params.get(name, default))

    @property
    def no_numbers(self) -> list[str]:
        """Options that Ray could not read as the number that they are to be."""
        given = [name for name in NUMBERS_GIVEN if name in self.ray_params]
        return [name for name in given if not _NUMBER.fullmatch(str(self.ray_params[name]))]

    @property
    def named_slots(self) -> dict[str, float] | None:
        """Custom resources; None where Ray could not read them.

        JSON in quotes: KubeRay puts it into a shell command.
        """
        try:
            (text,) = shlex.split(self.ray_params.get("resources", "{}"))
            named = {name: float(number) for name, number in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
        return named if all(0 <= number <= MOST for number in named.values()) else None


@dataclass(frozen=True, slots=True)
class Manifests:
    """Everything that one `kubectl apply` would send, as far as `k8s.schema_check` found it sound."""

    objects: tuple[Mapping[str, Any], ...]

    @classmethod
    def parse(cls, text: str) -> Manifests:
        """Of a text that is known to be sound."""
        return cls(tuple(documents(text)))

    def of_kind(self, *kinds: str) -> list[Mapping[str, Any]]:
        return [each for each in self.objects if each["kind"] in kinds]

    def has(self, kind: str, name: str) -> bool:
        return any(each["metadata"]["name"] == name for each in self.of_kind(kind))

    def pods(self) -> list[Pod]:
        found = [pod for service in self.of_kind(RAY_SERVICE) for pod in _ray_pods(service)]
        for workload in self.of_kind(*WORKLOADS):
            template = _template(workload)
            count = workload["spec"].get("replicas", 1)
            labels = template.get("metadata", {}).get("labels", {})
            name = workload["metadata"]["name"]
            found.append(Pod(named(workload), name, labels, template["spec"], {}, count, count))
        return found


def _template(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a workload's pods, with metadata and spec; a pod is its own."""
    if workload["kind"] == "Pod":
        return workload
    spec = workload["spec"]
    template: Mapping[str, Any] = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]
    return template


def gateway_labels(service: Mapping[str, Any]) -> dict[str, str] | None:
    """Labels of the pods behind the Gateway that KubeRay makes for a RayService; None where it makes none.

    Whatever implements the Gateway API puts this label on what it starts for a Gateway, in its namespace.
    """
    strategy = service["spec"].get("upgradeStrategy", {})
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return None
    return {GATEWAY_LABEL: f"{service['metadata']['name']}-gateway"}


def named(thing: Mapping[str, Any]) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes who has these labels; empty selects all."""
    has_all = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return has_all and all(_meets(each, labels) for each in selector.get("matchExpressions", ()))


def _meets(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """One of matchExpressions. Who lacks the label is not in any values."""
    key, values = requirement["key"], requirement.get("values", ())
    match requirement["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return False  # of another operator, which an API server refuses


def _ray_pods(service: Mapping[str, Any]) -> Iterator[Pod]:
    cluster = service["spec"]["rayClusterConfig"]
    is_scaled = cluster.get("enableInTreeAutoscaling", False)
    groups = [(HEAD_GROUP, cluster["headGroupSpec"], (1, 1))]
    groups += [
        (group["groupName"], group, numbers_of_pods(group, is_scaled=is_scaled))
        for group in cluster.get("workerGroupSpecs", ())
    ]
    for name, group, (low, high) in groups:
        labels, spec = pod_labels(name, group), group["template"]["spec"]
        yield Pod(f"{named(service)} {name}", name, labels, spec, group, low, high)
