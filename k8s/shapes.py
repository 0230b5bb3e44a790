"""The shape of an object where its kind's own schema leaves open what judgments rely on.

Most of it an API server would refuse as well, by rules that are in no schema. Knows no meaning of any field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]
Rule = tuple[str, Schema]  # where, with * for all of a list; what holds there, if there is anything

EACH = "*"
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
HARD_STOP_VARIABLE = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
OBJECT: Schema = {
    "type": "object",
    "properties": {
        "apiVersion": {"type": "string", "pattern": r"^([a-z0-9.-]{1,128}/)?[a-z0-9]{1,64}\Z"},
        "kind": {"type": "string", "pattern": r"^[A-Za-z][A-Za-z0-9]{0,63}\Z"},
        "metadata": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}},
            "required": ["name"],
        },
    },
    "required": ["apiVersion", "kind", "metadata"],
}
"""Of whatever kind."""

_QUANTITY: Schema = {
    "minimum": 0,
    "maximum": 1 << 63,
    "pattern": r"^\+?(\d{1,24}(\.\d*)?|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2})?\Z",
    "description": "a quantity, as 500m or 2Gi",
}
_QUANTITIES: Schema = {"additionalProperties": _QUANTITY}
_SECONDS: Schema = {"pattern": r"^\d+(\.\d+)?\Z", "description": "a number of seconds"}
_PORT: Schema = {"minimum": 1, "maximum": 65535}
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABELS: Schema = {
    "propertyNames": {"pattern": rf"^([a-z0-9.-]{{1,253}}/)?{_LABEL}\Z", "description": "a label's name"},
    "additionalProperties": {"pattern": rf"^({_LABEL})?\Z", "description": "a label's value"},
}
_TARGET: Schema = {"pattern": r"^[^:]+:\d{1,5}\Z", "description": "a host and its port, as host:8000"}


def _has(key: str) -> Schema:
    return {"required": [key]}


def _variable(name: str, value: Schema) -> Schema:
    """What a variable that is called so says."""
    return {"if": {"properties": {"name": {"const": name}}}, "then": {"properties": {"value": value}}}


_CONTAINER: tuple[Rule, ...] = (
    ("env.*", _variable(DRAIN_VARIABLE, _SECONDS)),
    ("env.*", _variable(HARD_STOP_VARIABLE, _SECONDS)),
    ("env.*.valueFrom.secretKeyRef", _has("name")),
    ("resources.limits", _QUANTITIES),
    ("resources.requests", _QUANTITIES),
)


def _below(path: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple((f"{path}.{place}", schema) for place, schema in rules)


_POD: tuple[Rule, ...] = (
    ("containers", {"minItems": 1}),
    *_below("containers.*", _CONTAINER),
    *_below("initContainers.*", _CONTAINER),
    ("volumes.*.secret", _has("secretName")),
    ("volumes.*.emptyDir.sizeLimit", _QUANTITY),
)
_TEMPLATE: tuple[Rule, ...] = (("template", _has("spec")), *_below("template.spec", _POD))
_GROUP: tuple[Rule, ...] = (*_TEMPLATE, ("resources", _QUANTITIES), ("labels", _LABELS))
_SPEC: Rule = ("", _has("spec"))
_WITH_PODS: tuple[Rule, ...] = (_SPEC, *_below("spec", _TEMPLATE))

_RULES: Mapping[str, tuple[Rule, ...]] = {
    "Pod": (_SPEC, *_below("spec", _POD)),
    **dict.fromkeys(("Deployment", "ReplicaSet", "DaemonSet", "Job"), _WITH_PODS),
    "StatefulSet": (
        *_WITH_PODS,
        ("spec.volumeClaimTemplates.*", _has("metadata")),
        ("spec.volumeClaimTemplates.*.metadata", _has("name")),
    ),
    "CronJob": (
        _SPEC,
        ("spec.jobTemplate", _has("spec")),
        *_below("spec.jobTemplate.spec", _TEMPLATE),
    ),
    "RayService": (
        _SPEC,
        ("spec", _has("serveConfigV2")),
        *_below("spec.rayClusterConfig.headGroupSpec", _GROUP),
        *_below("spec.rayClusterConfig.workerGroupSpecs.*", _GROUP),
        ("spec.rayClusterConfig.gcsFaultToleranceOptions.redisPassword.valueFrom.secretKeyRef", _has("name")),
    ),
    "Service": (_SPEC,),
    "PodDisruptionBudget": (_SPEC,),
    "NetworkPolicy": (
        _SPEC,
        ("spec.ingress.*.ports.*.port", _PORT),
        ("spec.ingress.*.ports.*.endPort", _PORT),
    ),
    "Ingress": (
        _SPEC,
        ("spec.rules.*.http.paths.*.backend", _has("service")),
        ("spec.rules.*.http.paths.*.backend.service", _has("port")),
    ),
    "HTTPRoute": (("spec.rules.*.backendRefs.*", _has("port")),),
    "ScrapeConfig": (
        ("spec.authorization.credentials", _has("name")),
        ("spec.staticConfigs.*.targets.*", _TARGET),
    ),
}


def _at(path: list[str], schema: Schema) -> Schema:
    for key in reversed(path):
        schema = {"items": schema} if key == EACH else {"properties": {key: schema}}
    return schema


SHAPES: Mapping[str, Schema] = {
    kind: {"allOf": [_at(place.split(".") if place else [], schema) for place, schema in rules]}
    for kind, rules in _RULES.items()
}
"""By kind; of objects that are as their kind's own schema has them."""

DASHBOARD: Schema = {
    "type": "object",
    "properties": {
        "panels": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "targets": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"expr": {"type": "string"}},
                            "required": ["expr", "refId"],
                        },
                    },
                },
                "required": ["title"],
            },
        },
    },
    "required": ["panels"],
}
"""Of Grafana, as far as its expressions are looked for."""
