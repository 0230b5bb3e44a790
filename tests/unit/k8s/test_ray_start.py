"""`rayStartParams` of every overlay are options that `ray start` takes: KubeRay passes them on."""

from __future__ import annotations

import json
import subprocess

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


@pytest.mark.parametrize("pod", [pod for _, pod in PODS], ids=[name for name, _ in PODS])
def test_they_pass_the_shell_that_kuberay_puts_them_into(pod: Pod) -> None:
    """It writes `--key=value` as it stands into the argument of `bash -c`: quotes survive one shell."""
    written = " ".join(f"--{key}={value}" for key, value in sorted(pod.ray_params.items()))
    shell = ["/bin/bash", "-c", "--", f'printf "%s\\0" {written}']
    heard = subprocess.run(shell, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
    given = start.make_context("start", heard).params
    named = {key: value for key, value in pod.slots.items() if key not in ("CPU", "GPU")}
    assert json.loads(given["resources"] or "{}") == named
    assert given["num_cpus"] == int(pod.slots["CPU"])


def test_one_node_can_stand_for_several_pods() -> None:
    routers, engines = (pod for name, pod in PODS if name in ("cpu-demo routers", "cpu-demo engines"))
    given = start.make_context("start", ray_options([routers, engines])).params
    assert given["num_cpus"] == routers.slots["CPU"] + engines.slots["CPU"]
    assert json.loads(given["resources"]) == {"router": 2, "engine": 2}
