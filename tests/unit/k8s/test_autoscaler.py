"""What Ray's own autoscaler reads in every overlay that has one: the groups, and that replicas fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from k8s.manifests import RAY_SERVICE, Manifests
from k8s.places import PLACES

SCALING = [place for place in PLACES.values() if place.name not in ("cpu-demo", "monitoring")]
NAMES = [place.name for place in SCALING]


def of_place(name: str) -> dict[str, Any]:
    (service,) = Manifests.parse(PLACES[name].kept.read_text()).of_kind(RAY_SERVICE)
    return read_by_ray(service)


def read_by_ray(service: Mapping[str, Any]) -> dict[str, Any]:
    """The autoscaling config that the sidecar derives from the RayCluster that KubeRay makes."""
    cluster = {
        "metadata": {"name": "warmpath-x", "namespace": service["metadata"]["namespace"]},
        "spec": service["spec"]["rayClusterConfig"],
    }
    found: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(cluster)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_what_the_manifests_say(name: str) -> None:
    groups = of_place(name)["available_node_types"]
    pods = [pod for pod in Manifests.parse(PLACES[name].kept.read_text()).pods() if pod.is_ray]
    assert groups.keys() == {pod.group for pod in pods}
    for pod in pods:
        resources = {key: value for key, value in groups[pod.group]["resources"].items() if key != "memory"}
        assert resources == {key: value for key, value in pod.slots.items() if value or key == "CPU"}
        if not pod.is_head:
            assert (groups[pod.group]["min_workers"], groups[pod.group]["max_workers"]) == (
                pod.min_pods,
                pod.max_pods,
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_that_finds_no_place_makes_it_start_a_pod(name: str) -> None:
    """Each deployment asks for no more than one pod of its group has: else no pod would ever come."""
    groups = of_place(name)["available_node_types"]
    config = PLACES[name].config() if PLACES[name].settings else PLACES["gpu"].config()
    for deployment, group in (("Router", "routers"), ("Replica", "engines")):
        options = config.options(deployment)["ray_actor_options"]
        wanted = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options["resources"]}
        has = groups[group]["resources"]
        assert all(has.get(key, 0) >= value for key, value in wanted.items()), (deployment, wanted, has)


@pytest.mark.parametrize("name", NAMES)
def test_idle_pods_are_kept_for_the_time_the_page_says(name: str) -> None:
    assert of_place(name)["idle_timeout_minutes"] == 5
