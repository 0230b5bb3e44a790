"""A group of a RayCluster as KubeRay makes pods of it: how many, with which labels and `ray start` options.

Source: KubeRay's `common/pod.go` and `utils/validation.go`, at the commit that schemas/README.md names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from k8s.quantities import quantity

HEAD_GROUP = "headgroup"
MOST_PODS = (1 << 31) - 1  # of a group that names no maxReplicas
AUTOSCALERS_NAMES = {"num-cpus": "CPU", "num-gpus": "GPU", "memory": "memory"}
"""Of what these options say, in a group's `resources`: Ray's autoscaler takes any other for a custom one."""

_GPU = re.compile(r"gpu$|nvidia\.com/mig-\d+g\.\d+gb$")
RESERVED = "ray.io/"

Group = Mapping[str, Any]


def numbers_of_pods(group: Group, *, is_scaled: bool) -> tuple[int, int]:
    """Fewest and most pods of a worker group. Without Ray's autoscaler: `replicas` of them, within both.

    What is left out is the definition's own: none at least, and any number.
    """
    if group.get("suspend"):
        return 0, 0
    low, high = group.get("minReplicas", 0), group.get("maxReplicas", MOST_PODS)
    if not is_scaled:
        low = high = min(max(low, group.get("replicas", 0)), high)
    num_hosts = group.get("numOfHosts", 1)  # pods that a replica of the group is
    return low * num_hosts, high * num_hosts


def given_labels(group: Group) -> dict[str, str]:
    """Those that the manifest gives a pod. A group's own are Ray's labels of the node besides."""
    return {**group["template"].get("metadata", {}).get("labels", {}), **group.get("labels", {})}


def pod_labels(name: str, group: Group) -> dict[str, str]:
    """With KubeRay's, of which some give way to the manifest's."""
    return {
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
        "ray.io/is-ray-node": "yes",
        **given_labels(group),
        "ray.io/node-type": "head" if name == HEAD_GROUP else "worker",
        "ray.io/group": name,
    }


def start_params(group: Group) -> dict[str, str]:
    """`rayStartParams`, with what the group's `resources` and `labels` put in their place."""
    params: dict[str, str] = dict(group.get("rayStartParams", {}))
    custom = {}
    for name, amount in group.get("resources", {}).items():
        option = _option(name)
        if option is None:
            number = float(quantity(amount))
            custom[name] = int(number) if number.is_integer() else number
        else:
            params[option] = str(math.ceil(quantity(amount)))
    if custom:
        params["resources"] = f"'{json.dumps(custom)}'"
    if labels := group.get("labels"):
        params["labels"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return params


def group_mistakes(group: Group, *, is_scaled: bool) -> Iterator[str]:
    """What KubeRay, Ray or its autoscaler refuses or takes otherwise."""
    params, resources = group.get("rayStartParams", {}), group.get("resources", {})
    if resources:
        for name in (*AUTOSCALERS_NAMES, "resources"):
            if params.get(name):
                yield f"rayStartParams.{name} beside resources: KubeRay refuses the cluster; keep one of them"
    for name in resources:
        wanted = AUTOSCALERS_NAMES.get(_option(name) or "", name)
        if is_scaled and name != wanted:
            yield f"resources.{name}: Ray's autoscaler takes it for a custom one; write {wanted}"
    if "labels" in params:
        yield "rayStartParams.labels: KubeRay refuses the cluster; the group's own labels are for it"
    for name in group.get("labels", {}):
        if name.startswith(RESERVED):
            yield f"labels.{name}: Ray keeps names below {RESERVED} to itself, and does not start"


def is_selected(group: Group, label_selector: Mapping[str, str]) -> bool:
    """Whether Ray puts who asks for these labels on the group's nodes: `a`, `!a`, `in(a, b)` or `!in(a, b)`.

    Those that Ray itself gives a node are not known before: any will do.
    """
    labels = group.get("labels", {})
    for name, wanted in label_selector.items():
        either = wanted.removeprefix("!").removeprefix("in(").removesuffix(")")
        is_one = labels.get(name) in [each.strip() for each in either.split(",")]
        if not name.startswith(RESERVED) and is_one == wanted.startswith("!"):
            return False
    return True


def _option(resource: str) -> str | None:
    """Of `ray start`, that a group's resource is; None for a custom one."""
    name = resource.lower()
    return {"cpu": "num-cpus", "memory": "memory"}.get(name, "num-gpus" if _GPU.search(name) else None)
