"""Everything that can be found wrong with the manifests without a cluster, in one pass over the overlays.

Drift first (what is written by commands is what they write), then each overlay: schemas, references,
hardening, capacity, and the Serve config inside with unknown keys refused. Starts nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from cache.errors import ServingError
from deploy.serve_file import ServeFile
from k8s.capacity import capacity_findings
from k8s.findings import Finding
from k8s.hardening import hardening_findings
from k8s.manifests import RAY_SERVICE, Manifests
from k8s.paths import path_findings
from k8s.places import COMMAND, HERE, PLACES, Place, build, can_build, digest_line
from k8s.promql import promql_findings
from k8s.references import reference_findings
from k8s.schema_check import schema_findings

EXAMPLES = HERE / "examples"


def check_all() -> Iterator[Finding]:
    for place in PLACES.values():
        yield from _drift(place)
        if place.kept.exists():
            yield from manifest_findings(place.name, beside(place.beside, place.kept.read_text()))
    yield from prefix_findings(PLACES.values())
    yield from promql_findings()
    for example in sorted(EXAMPLES.glob("*.yaml")):
        yield from manifest_findings(f"examples/{example.name}", beside("gpu", example.read_text()))


def beside(other: str | None, text: str) -> Manifests:
    """These objects and those of the overlay that they refer to."""
    known = () if other is None else Manifests.parse(PLACES[other].kept.read_text()).objects
    return Manifests((*known, *Manifests.parse(text).objects))


def manifest_findings(where: str, manifests: Manifests) -> Iterator[Finding]:
    """One overlay as kustomize builds it."""
    broken = list(schema_findings(where, manifests))
    yield from broken
    if broken:  # the rest relies on the shapes that schemas promise
        return
    config = None
    for service in manifests.of_kind(RAY_SERVICE):
        try:
            content = yaml.safe_load(service["spec"]["serveConfigV2"])
            config = ServeFile.checked(Path("serveConfigV2"), content)
        except (ServingError, yaml.YAMLError, KeyError, TypeError) as error:
            yield Finding(where, "RayService/serveConfigV2", str(error) or type(error).__name__)
    yield from reference_findings(where, manifests, config)
    yield from hardening_findings(where, manifests, config)
    if config is not None:
        yield from capacity_findings(where, manifests, config)
        yield from path_findings(where, manifests, config.route_prefix)


def prefix_findings(places: Iterable[Place]) -> Iterator[Finding]:
    """What is applied beside any overlay asks all of them for the same paths."""
    names: dict[str, list[str]] = {}
    for place in places:
        with contextlib.suppress(ServingError):  # `_drift` tells
            if place.settings:
                names.setdefault(place.config().route_prefix, []).append(place.name)
    if len(names) > 1:
        told = "; ".join(f"{prefix} in {', '.join(each)}" for prefix, each in names.items())
        message = f"must be one in all overlays, which share k8s/monitoring and k8s/examples: {told}"
        yield Finding("overlays", "serveConfigV2/route_prefix", message)


def _drift(place: Place) -> Iterator[Finding]:
    if place.settings:
        written = place.folder / "serve-config.yaml"
        try:
            is_fresh = written.exists() and written.read_text() == place.patch()
        except ServingError as error:
            yield Finding(place.name, "settings", f"{type(error).__name__}: {error}")
            return
        if not is_fresh:
            yield Finding(place.name, "serve-config.yaml", f"is not what deploy.yaml says: run `{COMMAND}`")
    kept = place.kept.read_text() if place.kept.exists() else ""
    first, _, rest = kept.partition("\n")
    if first != digest_line():
        message = f"was not built from these sources: run `{COMMAND}` where kubectl is installed"
        yield Finding(place.name, f"rendered/{place.name}.yaml", message)
    if can_build():
        try:
            is_same = build(place) == rest
        except subprocess.CalledProcessError as error:
            yield Finding(place.name, "kustomization.yaml", error.stderr.strip())
            return
        if not is_same:
            yield Finding(
                place.name, f"rendered/{place.name}.yaml", f"is not what kustomize builds: run `{COMMAND}`"
            )
