"""Objects against the schemas of their kinds: Kubernetes' own, and the copies in `schemas/` of others'.

Closed as a strict API server is: an unknown field is a finding, where it would be dropped in silence. Rules
in CEL are not evaluated. Here, and nowhere else, is found out which objects are what their judgments take
them for. Knows no meaning of any field.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from cache.errors import ServingError
from k8s.findings import Finding
from k8s.manifests import Manifests
from k8s.shapes import OBJECT, SHAPES, Schema

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


@dataclass(frozen=True, slots=True)
class Sorted:
    """Objects, by whether their shape can be relied on."""

    sound: Manifests
    findings: tuple[Finding, ...]  # about those that are left out
    is_whole: bool  # none is left out but those of kinds that nobody here knows


def sorted_out(where: str, documents: Iterable[Any]) -> Sorted:
    """documents: as `k8s.documents` reads them, objects or not."""
    sound, findings, is_whole = [], [], True
    for number, each in enumerate(documents, 1):
        try:
            messages = _messages_of(json.dumps(each))
        except UnknownKind as error:
            messages = (str(error),)
        else:
            is_whole = is_whole and not messages
        findings += [Finding(where, _called(each, number), message) for message in messages]
        sound += [] if messages else [each]
    return Sorted(Manifests(tuple(sound)), tuple(findings), is_whole)


def _called(document: Any, number: int) -> str:
    """Kind/name, as far as it says them."""
    if isinstance(document, dict):
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if document.get("kind") or name:
            return f"{document.get('kind', '?')}/{name or '?'}"
    return f"object {number}"


class UnknownKind(ServingError):
    """No schema of it is here."""


@cache
def _messages_of(document: str) -> tuple[str, ...]:
    """Kept by content: overlays share most objects, and each look reads Kubernetes' definitions again.

    Raises UnknownKind.
    """
    thing = json.loads(document)
    found = tuple(mistakes(OBJECT, thing)) or tuple(_mistakes_of_kind(thing))
    return found or tuple(mistakes(SHAPES.get(thing["kind"], {}), thing))


def mistakes(schema: Schema, thing: Any) -> Iterator[str]:
    """Each as `place: what is wrong`."""
    return map(_told, jsonschema.Draft202012Validator(schema).iter_errors(thing))


def _mistakes_of_kind(thing: Mapping[str, Any]) -> Iterator[str]:
    if thing["kind"] in PLURALS:
        validator = _definition(PLURALS[thing["kind"]], thing["apiVersion"])
        if validator is None:
            yield f"apiVersion: {thing['apiVersion']} is not served for {thing['kind']}"
            return
        yield from map(_told, validator.iter_errors(thing))
        return
    try:
        kubernetes_validate.validate(thing, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield _told(error)
    except kubernetes_validate.SchemaNotFoundError as error:
        raise UnknownKind(
            f"apiVersion: no {error.kind} in {error.api_version} of Kubernetes {error.version}"
        ) from None


def _told(error: Any) -> str:
    place = ".".join(str(part) for part in error.absolute_path) or "the object"
    if error.validator == "pattern" and "description" in error.schema:
        return f"{place}: {error.instance!r:.80} must be {error.schema['description']}"
    return f"{place}: {error.message[:300]}"


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
