"""`rayStartParams` of every overlay are options that `ray start` takes: KubeRay passes them on."""

from __future__ import annotations

import json

import pytest
from ray.scripts.scripts import start

from k8s.manifests import Manifests, Pod
from k8s.places import PLACES
from tests.e2e.pods import ray_options

PODS: list[tuple[str, Pod]] = [
    (f"{place.name} {pod.group}", pod)
    for place in PLACES.values()
    for pod in Manifests.parse(place.kept.read_text()).pods()
    if pod.is_ray
]


@pytest.mark.parametrize("pod", [pod for _, pod in PODS], ids=[name for name, _ in PODS])
def test_ray_start_takes_them(pod: Pod) -> None:
    known = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    assert pod.ray_params
    assert pod.ray_params.keys() <= known
    given = start.make_context("start", ray_options([pod])).params
    assert given["num_cpus"] == int(pod.slots["CPU"])
    assert given["object_store_memory"] == int(pod.ray_params["object-store-memory"])


def test_one_node_can_stand_for_several_pods() -> None:
    routers, engines = (pod for name, pod in PODS if name in ("cpu-demo routers", "cpu-demo engines"))
    given = start.make_context("start", ray_options([routers, engines])).params
    assert given["num_cpus"] == routers.slots["CPU"] + engines.slots["CPU"]
    assert json.loads(given["resources"]) == {"router": 2, "engine": 2}
