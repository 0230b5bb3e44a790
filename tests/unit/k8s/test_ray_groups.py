"""Groups are judged by the pods and nodes that KubeRay makes of them: `resources` and `labels` count."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from k8s.manifests import RAY_SERVICE, Manifests
from k8s.ray_groups import start_params
from tests.unit.k8s.breaks import Break, cluster, drop, findings, group, serve, shipped
from tests.unit.k8s.test_autoscaler import read_by_ray

STORE = {"object-store-memory": "268435456"}  # no part of what `resources` stands for


def by_resources(things: dict[str, dict[str, Any]], **more: str) -> None:
    """What the groups of `ha` have as `rayStartParams`, as KubeRay 1.5's `resources`."""
    for each, named in ((cluster(things)["headGroupSpec"], {}), (group(things, 0), {"router": "1"})):
        each.update(rayStartParams=dict(STORE), resources={"CPU": "2" if named else "0", **named})
    group(things, 1).update(rayStartParams=dict(STORE), resources={"CPU": "1", "engine": "1", **more})


def labelled(things: dict[str, dict[str, Any]]) -> None:
    group(things, 1)["labels"] = {"card": "h200"}
    selector = "label_selector: {card: 'in(h100, h200)', ray.io/accelerator-type: H200}"
    serve(things, "num_gpus: 1\n", f"num_gpus: 1\n      {selector}\n")


def label_of_the_group_alone(things: dict[str, dict[str, Any]]) -> None:
    """KubeRay gives it to the pods too, and policies select by it."""
    for each in (cluster(things)["headGroupSpec"], *cluster(things)["workerGroupSpecs"]):
        each["labels"] = each["template"]["metadata"].pop("labels")


@pytest.mark.parametrize(
    "change",
    [
        by_resources,
        lambda t: by_resources(t, GPU="1"),
        labelled,
        label_of_the_group_alone,
        lambda t: drop(group(t, 1)["rayStartParams"], "num-cpus"),
        lambda t: drop(group(t, 1)["rayStartParams"], "num-gpus"),
        lambda t: group(t, 1)["rayStartParams"].update(resources="""'{"engine": 1}'"""),
    ],
)
def test_what_kuberay_makes_of_a_group_is_fine(change: Break) -> None:
    assert findings(shipped("ha"), change) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: group(t, 1).update(resources={"engine": "1"}),
            "engines: rayStartParams.num-cpus beside resources: KubeRay refuses the cluster",
        ),
        (lambda t: by_resources(t, engine="2"), "2 engines for 1 GPU"),
        (lambda t: by_resources(t, engine="500m"), "8 replicas in full, places for 0"),
        (lambda t: by_resources(t, engine="one"), "resources.engine: 'one' must be a quantity"),
        (lambda t: by_resources(t, GPU="2"), "num-gpus is 2; the container gets 1"),
        (lambda t: by_resources(t, CPU="8500m"), "num-cpus is 9; the container may use 8"),
        (
            lambda t: by_resources(t, **{"nvidia.com/gpu": "1"}),
            "resources.nvidia.com/gpu: Ray's autoscaler takes it for a custom one; write GPU",
        ),
        (lambda t: drop(cluster(t)["headGroupSpec"]["rayStartParams"], "num-cpus"), "num-cpus must be 0"),
        (
            lambda t: group(t, 1)["rayStartParams"].update(labels="card=h200"),
            "rayStartParams.labels: KubeRay refuses the cluster",
        ),
        (lambda t: group(t, 1).update(labels={"ray.io/card": "h200"}), "labels.ray.io/card: Ray keeps names"),
        (
            lambda t: group(t, 1).update(labels={"card": "H 200"}),
            "labels.card: 'H 200' must be a label's value",
        ),
        (lambda t: group(t, 1).update(labels={"-card": ""}), "labels: '-card' must be a label's name"),
        (
            lambda t: (labelled(t), group(t, 1).update(labels={"card": "l4"}))[0],
            "places for 0: one asks for {'CPU': 1.0, 'GPU': 1, 'engine': 1, 'card': 'in(h100, h200)'",
        ),
        (
            lambda t: group(t, 1).update(labels={"app.kubernetes.io/name": "x"}),
            "label app.kubernetes.io/name: the head's Service selects by KubeRay's own",
        ),
        (
            lambda t: group(t, 1).update(labels={"app.kubernetes.io/part-of": "x"}),
            "topologySpreadConstraints: labelSelector does not match the pod itself",
        ),
    ],
)
def test_mistake_in_a_group_is_found(change: Break, words: str) -> None:
    told = findings(shipped("ha"), change)
    assert any(words in each for each in told), told


def test_rays_autoscaler_reads_the_same_of_resources() -> None:
    service = copy.deepcopy(dict(shipped("ha").of_kind(RAY_SERVICE)[0]))
    by_resources({"RayService/warmpath": service}, GPU="1")
    groups = read_by_ray(service)["available_node_types"]
    for pod in Manifests((service,)).pods():
        read = {name: amount for name, amount in groups[pod.group]["resources"].items() if name != "memory"}
        assert read == {name: amount for name, amount in pod.slots.items() if amount or name == "CPU"}


def test_options_as_kuberay_passes_them_on() -> None:
    group = {
        "rayStartParams": {"block": "true"},
        "resources": {"cpu": "1500m", "nvidia.com/mig-2g.20gb": "1", "memory": "1Gi", "a": "2", "b": "500m"},
        "labels": {"z": "1", "y": "2"},
    }
    assert start_params(group) == {
        "block": "true",
        "num-cpus": "2",
        "num-gpus": "1",
        "memory": str(2**30),
        "resources": """'{"a": 2, "b": 0.5}'""",
        "labels": "y=2,z=1",
    }
