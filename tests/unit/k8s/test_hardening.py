"""Pods and policies that are less closed, or less patient, than ours are found, and others let be."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.router_variable import ROUTER_VARIABLE
from k8s.shapes import DRAIN_VARIABLE
from tests.unit.k8s.breaks import (
    Break,
    cluster,
    container,
    drop,
    findings,
    found_in,
    group,
    head,
    in_places,
    policy,
    serve,
    shipped,
    worker,
)


def undrained(container: dict[str, Any]) -> None:
    container["env"] = [each for each in container["env"] if each["name"] != DRAIN_VARIABLE]


IN_DEMO: list[tuple[Break, str]] = [
    (lambda t: drop(cluster(t), "authOptions"), "authOptions.mode must be token"),
    (lambda t: cluster(t)["authOptions"].update(mode="disabled"), "authOptions.mode must be token"),
    (lambda t: container(t, 1)["env"].pop(0), "env RAY_AUTH_MODE is None"),
    (
        lambda t: container(t, 1)["env"].append({"name": "A", "value": "b"}),
        "env differs between head and workers",
    ),
    (
        lambda t: container(t, 0)["env"].append({"name": ROUTER_VARIABLE, "value": "policy: random"}),
        "env WARMPATH_ROUTER: belongs into ray_actor_options.runtime_env.env_vars of Router",
    ),
    (lambda t: container(t, 1).update(image="warmpath"), "is not pinned"),
    (lambda t: container(t, 1).update(image="warmpath:latest"), "is not pinned"),
    (
        lambda t: container(t, 1)["securityContext"].update(readOnlyRootFilesystem=False),
        "readOnlyRootFilesystem",
    ),
    (
        lambda t: container(t, 1)["securityContext"].update(capabilities={"add": ["SYS_PTRACE"]}),
        "capabilities",
    ),
    (lambda t: worker(t, 1).update(automountServiceAccountToken=True), "automountServiceAccountToken"),
    (lambda t: worker(t, 1).update(hostNetwork=True), "hostNetwork must not be set"),
    (
        lambda t: worker(t, 1)["securityContext"].update(runAsUser=0),
        "engines: securityContext.runAsUser must",
    ),
    (
        lambda t: container(t, 1)["securityContext"].update(runAsUser=0),
        "ray-worker: securityContext.runAsUser",
    ),
    (
        lambda t: worker(t, 1).update(tolerations=[{"key": "karpenter.sh/disrupted", "operator": "Exists"}]),
        "on nodes that are being emptied",
    ),
    (lambda t: worker(t, 1).update(tolerations=[{"operator": "Exists"}]), "on nodes that are being emptied"),
    (lambda t: worker(t, 1)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}), "hostPath"),
    (lambda t: drop(t, "NetworkPolicy/deny-all"), "no NetworkPolicy closes it by default"),
    (lambda t: drop(t["NetworkPolicy/ray-to-ray"]["spec"]["ingress"][0], "from"), "opens every port"),
    (
        lambda t: drop(t["NetworkPolicy/namespace-to-serve"]["spec"]["ingress"][0], "from"),
        "open to everybody",
    ),
    (lambda t: worker(t, 0).update(terminationGracePeriodSeconds=140), "DRAIN_TIMEOUT_S is 140; should"),
    (lambda t: undrained(container(t, 0)), "DRAIN_TIMEOUT_S is 30; should be above"),
    (lambda t: drop(container(t, 0), "lifecycle"), "preStop must sleep"),
    (
        lambda t: container(t, 0).update(lifecycle={"preStop": {"exec": {"command": ["sleep", "soon"]}}}),
        "preStop must sleep",
    ),
    (
        lambda t: t["RayService/warmpath"]["spec"].update(rayClusterDeletionDelaySeconds=60),
        "should be above 120",
    ),
    (lambda t: serve(t, "graceful_shutdown_timeout_s: 120", "graceful_shutdown_timeout_s: 300"), "above 300"),
    (lambda t: drop(container(t, 0), "livenessProbe"), "livenessProbe is missing"),
    (lambda t: cluster(t).update(rayVersion="2.40.0"), "rayVersion is 2.40.0"),
    (
        lambda t: group(t, 1)["rayStartParams"].update({"object-store-memory": "999999999"}),
        "object-store-memory",
    ),
    (lambda t: worker(t, 1)["volumes"][1].update(emptyDir={"sizeLimit": "1Gi"}), "of medium Memory"),
    (lambda t: container(t, 1)["resources"]["requests"].update(memory="1Gi"), "request and limit differ"),
    (lambda t: drop(container(t, 1)["resources"], "limits"), "needs a request and a limit"),
    (
        lambda t: t.update(
            s={"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "warmpath"}}
        ),
        "no Secret belongs into a manifest",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "debug_token: sixteen-characters"),
        "args.router.debug_token: no secret belongs into a manifest",
    ),
    (
        lambda t: serve(t, "expose_routing: false", "record: {folder: /tmp/t, key: sixteen-characters}"),
        "args.router.record.key: no secret belongs into a manifest",
    ),
    (
        lambda t: policy(t, "namespace-to-serve")["ports"][0].update(endPort=8264),
        "opens 263 ports, 8001 to 8264",
    ),
    (lambda t: policy(t, "namespace-to-serve")["ports"][0].pop("port"), "opens every port"),
    (
        lambda t: policy(t, "namespace-to-serve").update({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}),
        "is open to everybody",
    ),
    (
        lambda t: policy(t, "namespace-to-serve").update({"from": [{"namespaceSelector": {}}]}),
        "is open to everybody",
    ),
    (
        lambda t: t["NetworkPolicy/deny-all"]["spec"].update(policyTypes=["Egress"]),
        "no NetworkPolicy closes it by default",
    ),
]


IN_UPGRADE: list[tuple[Break, str]] = [
    (
        lambda t: drop(t, "NetworkPolicy/everybody-to-gateway"),
        "nobody is let in to port 80 of the Gateway's pods",
    ),
]


@pytest.mark.parametrize(
    ("place", "change", "words"), in_places({"cpu-demo": IN_DEMO, "upgrade": IN_UPGRADE})
)
def test_mistake_is_found(place: str, change: Break, words: str) -> None:
    told = found_in(place, change)
    assert any(words in each for each in told), told


@pytest.mark.parametrize("kind", ["Pod", "DaemonSet", "CronJob"])
def test_pods_of_whatever_makes_them_are_judged(kind: str) -> None:
    """Only those of Deployments, StatefulSets and Jobs were."""
    containers = [{"name": "x", "image": "x:1", "securityContext": {"privileged": True}}]
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": containers}}
    spec: dict[str, Any] = {"selector": {"matchLabels": {"a": "b"}}, "template": template}
    if kind == "Pod":
        spec = template["spec"]
    elif kind == "CronJob":
        template["spec"] |= {"restartPolicy": "Never"}
        spec = {"schedule": "0 4 * * *", "jobTemplate": {"spec": {"template": template}}}
    version = {"Pod": "v1", "DaemonSet": "apps/v1", "CronJob": "batch/v1"}[kind]
    metadata = {"name": "x", "namespace": "warmpath"}

    def added(things: dict[str, dict[str, Any]]) -> None:
        things["x"] = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    told = findings(shipped("ha"), added)
    assert any(each.startswith(f"x: {kind}/x: container x: securityContext.allowPriv") for each in told), told


def users_of_the_clusters_own(things: dict[str, dict[str, Any]]) -> None:
    for template in (head(things), worker(things, 0), worker(things, 1)):
        for key in ("runAsUser", "runAsGroup", "fsGroup"):
            drop(template["securityContext"], key)


@pytest.mark.parametrize(
    "change",
    [
        users_of_the_clusters_own,
        lambda t: container(t, 0).update(lifecycle={"preStop": {"sleep": {"seconds": 5}}}),
        lambda t: container(t, 0).update(lifecycle={"preStop": {"exec": {"command": ["sleep", "5s"]}}}),
        lambda t: t["NetworkPolicy/deny-all"]["spec"].update(ingress=[]),
    ],
)
def test_what_places_have_otherwise_is_fine(change: Break) -> None:
    """Each was named as a mistake, or ended the check."""
    assert findings(shipped("ha"), change) == []
