"""Whether what the Serve config asks for fits into the pods: slots, CPUs, GPUs, memory and threads.

At rest, in full, and during a rolling update: a deployment that does not fit waits for ever without an
error, and a GPU that nobody may use is paid for. Pure arithmetic over one overlay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cache.counted import counted
from deploy.cpus import cpus_each
from deploy.scaling_options import replica_bounds
from deploy.serve_file import ServeFile
from k8s.findings import Finding
from k8s.manifests import RAY_SERVICE, Manifests, Pod, named, selects
from k8s.ray_groups import MOST_PODS, group_mistakes, is_selected
from replica.config import ReplicaConfig
from replica.memory import human_bytes

SLOT_BY_DEPLOYMENT = {"Router": "router", "Replica": "engine"}
"""The custom Ray resource that places each deployment on its own group of pods."""

_FIXED = "without enableInTreeAutoscaling (components/autoscaling) there are as many pods as `replicas` says"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one deployment asks for."""

    name: str
    per_replica: Mapping[str, float]  # Ray resources of one replica
    low: int  # replicas at rest
    high: int  # at most, a rolling update included
    per_pod: int | None  # max_replicas_per_node
    label_selector: Mapping[str, str]  # labels of the groups that it may be on


def capacity_findings(where: str, manifests: Manifests, config: ServeFile) -> Iterator[Finding]:
    """Whether each deployment finds its places, each pod is what it says, and each budget lets pods go."""
    pods = [pod for pod in manifests.pods() if pod.is_ray]
    is_scaled = _is_scaled(manifests)
    for name, slot in SLOT_BY_DEPLOYMENT.items():
        demand = _demand(name, config.options(name))
        if not demand.per_replica.get(slot):
            yield Finding(
                where, f"serveConfigV2/{name}", f"ray_actor_options.resources must ask for {slot!r}"
            )
            continue
        selected = [pod for pod in pods if is_selected(pod.ray_group, demand.label_selector)]
        fitting = [pod for pod in selected if pod.slots.get(slot)]
        for message in _missing_places(demand, fitting, is_scaled=is_scaled):
            yield Finding(where, f"serveConfigV2/{name}", message)
        for pod in fitting:
            for message in _idle(demand, pod, fitting):
                yield Finding(where, pod.owner, message)
    for pod in pods:
        mistakes = group_mistakes(pod.ray_group, is_scaled=is_scaled)
        for message in (*mistakes, *_offered(pod), *_engines(pod, config.app.replica)):
            yield Finding(where, pod.owner, message)
    yield from _budgets(where, manifests, config)


def _missing_places(demand: Demand, fitting: list[Pod], *, is_scaled: bool) -> Iterator[str]:
    """fitting: pods of groups that the deployment may be on, with its slot."""
    at_rest = sum(pod.min_pods * _places(demand, pod) for pod in fitting)
    if at_rest < demand.low:
        yield f"{demand.low} replicas at rest, places for {at_rest}: {_shape(demand, fitting)}"
    in_full = sum(pod.max_pods * _places(demand, pod) for pod in fitting)
    if in_full < demand.high:
        advice = "" if is_scaled else f"; {_FIXED}"
        yield f"{demand.high} replicas in full, places for {in_full}: {_shape(demand, fitting)}{advice}"


def _is_scaled(manifests: Manifests) -> bool:
    services = manifests.of_kind(RAY_SERVICE)
    return any(each["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling") for each in services)


def _demand(name: str, options: Mapping[str, Any]) -> Demand:
    actor = options.get("ray_actor_options", {})
    per_replica = {"CPU": cpus_each(name, options), "GPU": actor.get("num_gpus") or 0}
    per_replica |= {"memory": actor["memory"]} if actor.get("memory") else {}
    per_replica |= actor.get("resources") or {}
    low, high = replica_bounds(options)
    surge = math.ceil(high * options.get("max_surge_percent", 0) / 100)
    per_pod, selector = options.get("max_replicas_per_node"), actor.get("label_selector") or {}
    return Demand(name, per_replica, low, high + surge, per_pod, selector)


def _budgets(where: str, manifests: Manifests, config: ServeFile) -> Iterator[Finding]:
    """A budget that never lets a pod go holds up every drain, and every upgrade of nodes, for ever."""
    for each in manifests.of_kind("PodDisruptionBudget"):
        ready = 0
        for pod in manifests.pods():
            if selects(each["spec"].get("selector", {}), pod.labels):
                wanted = [
                    config.options(name) for name, slot in SLOT_BY_DEPLOYMENT.items() if pod.slots.get(slot)
                ]
                # A pod without a replica has no proxy, so it is not ready.
                low = sum(replica_bounds(options)[0] for options in wanted) if pod.is_ray else pod.min_pods
                ready += min(pod.min_pods, low)
        least = each["spec"].get("minAvailable")
        if not isinstance(least, int):
            yield Finding(
                where, named(each), "minAvailable must be a number: a RayCluster has no scale subresource"
            )
        elif least >= ready:
            message = f"minAvailable is {least} of {ready} pods that are ready: none may ever be drained"
            yield Finding(where, named(each), message)


def _places(demand: Demand, pod: Pod) -> int:
    """Replicas that one pod holds."""
    offered = {**pod.slots, "memory": pod.number_given("memory", pod.memory_bytes)}
    shares = [offered.get(key, 0) / value for key, value in demand.per_replica.items() if value]
    counts = [math.floor(min(each, MOST_PODS)) for each in shares]  # of next to nothing: infinity
    return min([*counts, *([] if demand.per_pod is None else [demand.per_pod])])


def _idle(demand: Demand, pod: Pod, fitting: list[Pod]) -> Iterator[str]:
    """Pods with GPUs that are always there, and that no replica ever needs; asked of those that take GPUs."""
    per_pod = _places(demand, pod)
    if not per_pod or not demand.per_replica["GPU"]:
        return
    spare = sum(each.min_pods * _places(demand, each) for each in fitting) - demand.high
    idle = min(pod.min_pods, spare // per_pod)
    if idle > 0:
        yield (
            f"{pod.min_pods} pods with GPUs are always there, {idle} more than {demand.high} replicas of "
            f"{demand.name} ever take: lower replicas and minReplicas, or raise max_surge_percent, so that a "
            "rolling update starts new ones there"
        )


def _shape(demand: Demand, pods: list[Pod]) -> str:
    each = ", ".join(f"{pod.group} {_number(pod)} of {pod.slots}" for pod in pods)
    asked = dict(demand.per_replica) | dict(demand.label_selector)
    return f"one asks for {asked}; {each or 'no pod offers it'}"


def _number(pod: Pod) -> str:
    if pod.min_pods == pod.max_pods:
        return counted(pod.min_pods, "pod")
    return f"{pod.min_pods}-{pod.max_pods} pods"


def _offered(pod: Pod) -> Iterator[str]:
    """What the pod tells Ray of itself, as Ray reads it and as the container has it."""
    if pod.named_slots is None:
        told = pod.ray_params["resources"]
        yield f"""rayStartParams.resources is {told}; must be JSON in quotes: '"{{\\"engine\\": 1}}"'"""
    for name in pod.no_numbers:
        yield f"rayStartParams.{name} is {pod.ray_params[name]}; must be a number in quotes, without a unit"
    if pod.slots["CPU"] > pod.num_cpus:
        yield f"num-cpus is {pod.slots['CPU']:g}; the container may use {pod.num_cpus:g}"
    if pod.slots["GPU"] != pod.num_gpus:
        yield f"num-gpus is {pod.slots['GPU']:g}; the container gets {pod.num_gpus}"


def _engines(pod: Pod, replica: ReplicaConfig) -> Iterator[str]:
    """Whether as many engines as the pod is for have what they take of it."""
    engines = pod.slots.get("engine", 0)
    if not engines:
        return
    cpus, gpus = pod.num_cpus, pod.num_gpus
    # A simulated engine keeps nothing of blocks but their names.
    host_bytes = int(engines * replica.host_cache_gib * (1 << 30)) if replica.runner != "simulated" else 0
    if host_bytes and host_bytes + pod.shared_bytes >= pod.memory_bytes:
        yield (
            f"args.replica.host_cache_gib is {replica.host_cache_gib:g}: {counted(int(engines), 'engine')} "
            f"would keep {human_bytes(host_bytes)} beside {human_bytes(pod.shared_bytes)} of mounted memory; "
            f"the container may use {human_bytes(pod.memory_bytes)}, processes and weights included"
        )
    expected = "cuda" if gpus else "cpu"
    if replica.device != expected:
        yield f"args.replica.device is {replica.device}; these pods are for {expected}"
    if gpus and engines > gpus:
        yield f"{engines:g} engines for {counted(gpus, 'GPU')}"
    # A container sees all cores of its node: torch would start a thread for each.
    if replica.torch_threads is None or replica.torch_threads * engines > cpus:
        threads = replica.torch_threads
        yield f"args.replica.torch_threads is {threads}; {engines:g} engines share {cpus:g} CPUs"
