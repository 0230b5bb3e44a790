"""Manifests against the schemas of their kinds: Kubernetes' own, and the copies in `schemas/` of others'.

Closed as a strict API server is: an unknown field is a finding, where it would be dropped in silence. Rules
in CEL are not evaluated. Knows no meaning of any field.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from k8s.findings import Finding
from k8s.manifests import Manifests, named

KUBERNETES_VERSION = "1.32"
SCHEMAS = Path(__file__).parent / "schemas"
PLURALS = {
    "RayService": "rayservices.ray.io",
    "HTTPRoute": "httproutes.gateway.networking.k8s.io",
    "PodMonitor": "podmonitors.monitoring.coreos.com",
    "PrometheusRule": "prometheusrules.monitoring.coreos.com",
    "ScrapeConfig": "scrapeconfigs.monitoring.coreos.com",
}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 63},
        "namespace": {"type": "string"},
        "labels": _STRINGS,
        "annotations": _STRINGS,
    },
    "required": ["name"],
    "additionalProperties": False,
}


def schema_findings(where: str, manifests: Manifests) -> Iterator[Finding]:
    for each in manifests.objects:
        for message in _messages_of(json.dumps(each)):
            yield Finding(where, named(each), message)


@cache
def _messages_of(thing: str) -> tuple[str, ...]:
    """Kept by content: overlays share most objects, and each look reads Kubernetes' definitions again."""
    return tuple(_messages(json.loads(thing)))


def _messages(thing: Mapping[str, Any]) -> Iterator[str]:
    if thing["kind"] in PLURALS:
        validator = _definition(PLURALS[thing["kind"]], thing["apiVersion"])
        if validator is None:
            yield f"apiVersion: {thing['apiVersion']} is not served for {thing['kind']}"
            return
        for error in validator.iter_errors(thing):
            yield _told(error)
        return
    try:
        kubernetes_validate.validate(thing, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield _told(error)
    except kubernetes_validate.SchemaNotFoundError as error:
        yield f"apiVersion: no {error.kind} in {error.api_version} of Kubernetes {error.version}"


def _told(error: Any) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    return f"{place or 'the object'}: {error.message[:300]}"


@cache
def _definition(file: str, api_version: str) -> jsonschema.Draft202012Validator | None:
    """The schema of one served version; None if it is not served."""
    text = lzma.decompress((SCHEMAS / f"{file}.yaml.xz").read_bytes())
    # libyaml's loader where there is one: a definition is a megabyte.
    definition = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for version in definition["spec"]["versions"]:
        if f"{definition['spec']['group']}/{version['name']}" == api_version and version["served"]:
            schema = _closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = METADATA
            return jsonschema.Draft202012Validator(schema)
    return None


def _closed(schema: Any) -> Any:
    """Kubernetes' structural schema as JSON Schema: no field beyond those named, defaults filled in."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            closed[key] = {name: _closed(each) for name, each in value.items()}
        elif key not in ("format", "description", "default") and not key.startswith("x-kubernetes-"):
            closed[key] = _closed(value)
    if "required" in schema:
        properties = schema.get("properties", {})
        closed["required"] = [
            name for name in schema["required"] if "default" not in properties.get(name, {})
        ]
    if schema.get("nullable"):
        closed["type"] = [closed["type"], "null"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in closed
    if "properties" in closed and not is_open:
        closed["additionalProperties"] = False
    return closed
