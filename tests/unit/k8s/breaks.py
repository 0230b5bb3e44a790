"""Shipped manifests with one thing changed, and what is found wrong with them then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from k8s.check import manifest_findings
from k8s.documents import as_sent
from k8s.manifests import Manifests, named
from k8s.places import PLACES

Break = Callable[[dict[str, dict[str, Any]]], None]


@cache
def shipped(name: str) -> Manifests:
    """An overlay as it is kept."""
    return Manifests.parse(PLACES[name].kept.read_text())


def beside(name: str, text: str) -> Manifests:
    """These objects, and those of the overlay that they refer to."""
    return Manifests((*shipped(name).objects, *Manifests.parse(text).objects))


def in_places(mistakes: Mapping[str, Sequence[tuple[Break, str]]]) -> list[tuple[str, Break, str]]:
    """Of each overlay's, one by one: the overlay, the change, and words of what is found wrong then."""
    return [(name, *each) for name, those in mistakes.items() for each in those]


def found_in(name: str, change: Break) -> list[str]:
    """In that overlay, with what it refers to."""
    other = PLACES[name].beside
    return findings(shipped(name) if other is None else beside(other, PLACES[name].kept.read_text()), change)


def findings(manifests: Manifests, change: Break) -> list[str]:
    things = {named(each): copy.deepcopy(dict(each)) for each in manifests.objects}
    change(things)
    return [str(each) for each in manifest_findings("x", [*as_sent(things.values())])]


def cluster(things: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = things["RayService/warmpath"]["spec"]["rayClusterConfig"]
    return spec


def head(things: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = cluster(things)["headGroupSpec"]["template"]["spec"]
    return spec


def group(things: dict[str, dict[str, Any]], index: int) -> dict[str, Any]:
    found: dict[str, Any] = cluster(things)["workerGroupSpecs"][index]
    return found


def worker(things: dict[str, dict[str, Any]], index: int) -> dict[str, Any]:
    spec: dict[str, Any] = group(things, index)["template"]["spec"]
    return spec


def container(things: dict[str, dict[str, Any]], index: int) -> dict[str, Any]:
    found: dict[str, Any] = worker(things, index)["containers"][0]
    return found


def serve(things: dict[str, dict[str, Any]], before: str, after: str) -> None:
    spec = things["RayService/warmpath"]["spec"]
    assert before in spec["serveConfigV2"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace(before, after)


def policy(things: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Its one rule."""
    rule: dict[str, Any] = things[f"NetworkPolicy/{name}"]["spec"]["ingress"][0]
    return rule


def unscaled(things: dict[str, dict[str, Any]], pods: int) -> None:
    """Without components/autoscaling, and so many pods for engines."""
    for key in ("enableInTreeAutoscaling", "autoscalerOptions"):
        drop(cluster(things), key)
    head(things)["volumes"] = [each for each in head(things)["volumes"] if each["name"] != "kubernetes-api"]
    group(things, 1).update(replicas=pods)


def drop(mapping: dict[str, Any], key: str) -> None:
    del mapping[key]
