"""Serve configs that do not fit into their pods, and pods that nobody needs, are found."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.unit.k8s.breaks import (
    Break,
    cluster,
    container,
    drop,
    findings,
    found_in,
    group,
    in_places,
    serve,
    shipped,
    unscaled,
)


def two_cards_each(things: dict[str, dict[str, Any]]) -> None:
    serve(things, "num_gpus: 1", "num_gpus: 2")
    serve(things, "device: cuda\n", "device: cuda\n      tensor_parallel: 2\n")


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


IN_DEMO: list[tuple[Break, str]] = [
    (
        lambda t: group(t, 1)["rayStartParams"].update(memory="40Gi"),
        "rayStartParams.memory is 40Gi; must be a number",
    ),
    (
        lambda t: group(t, 1)["rayStartParams"].update({"num-cpus": "all"}),
        "rayStartParams.num-cpus is all; must be a number",
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


IN_HA: list[tuple[Break, str]] = [
    (lambda t: serve(t, "max_replicas: 8", "max_replicas: 9"), "9 replicas in full, places for 8"),
    (
        lambda t: serve(t, "max_surge_percent: 50", "max_surge_percent: 100"),
        "4 replicas in full, places for 3",
    ),
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


MISTAKES = in_places({"cpu-demo": IN_DEMO, "ha": IN_HA})


@pytest.mark.parametrize(("place", "change", "words"), MISTAKES)
def test_mistake_is_found(place: str, change: Break, words: str) -> None:
    told = found_in(place, change)
    assert any(words in each for each in told), told


def engines_in_reserve(things: dict[str, dict[str, Any]]) -> None:
    """A rolling update has a use for them."""
    unscaled(things, 3)
    two_replicas(things, max_surge_percent=50)


def parts_of_cards(things: dict[str, dict[str, Any]]) -> None:
    for amounts in container(things, 1)["resources"].values():
        amounts["nvidia.com/mig-3g.40gb"] = amounts.pop("nvidia.com/gpu")


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
        lambda t: serve(t, "num_gpus: 1", "num_gpus: 1\n      memory: 1.0e-300"),
        parts_of_cards,
    ],
)
def test_what_fits_is_fine(change: Break) -> None:
    assert findings(shipped("ha"), change) == []


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


def simulated(things: dict[str, dict[str, Any]]) -> None:
    """Which keeps nothing of blocks but their names."""
    serve(things, "device: cuda\n", "device: cuda\n      runner: simulated\n      host_cache_gib: 64\n")


@pytest.mark.parametrize("change", [one_group, several_hosts, simulated])
def test_what_is_meant_so_is_fine(change: Break) -> None:
    """Each was named as a mistake."""
    assert findings(shipped("gpu"), change) == []
