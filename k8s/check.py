"""Everything that can be found wrong with the manifests without a cluster, in one pass over the overlays.

Drift first (what is written by commands is what they write), then each overlay: schemas, the Serve config
inside with unknown keys refused, hardening, references, capacity. What has not the shape of its kind is told
and not judged any further. Starts nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from cache.errors import ServingError
from deploy import strict_yaml
from deploy.serve_file import ServeFile
from k8s.capacity import capacity_findings
from k8s.documents import documents
from k8s.findings import Finding
from k8s.hardening import hardening_findings, policy_findings
from k8s.manifests import RAY_SERVICE
from k8s.paths import path_findings
from k8s.places import COMMAND, HERE, PLACES, Place, build, can_build, digest_line
from k8s.promql import promql_findings
from k8s.references import reference_findings
from k8s.schema_check import sorted_out

EXAMPLES = HERE / "examples"


def check_all() -> Iterator[Finding]:
    told: dict[str, set[tuple[str, str]]] = {}
    files = [(place.name, place.kept, place.beside) for place in PLACES.values()]
    files += [(f"examples/{each.name}", each, "gpu") for each in sorted(EXAMPLES.glob("*.yaml"))]
    for where, path, other in files:
        if where in PLACES:
            yield from _drift(PLACES[where])
        others = [] if other is None else [PLACES[other].kept]
        found = [(each, (each.object_name, each.message)) for each in _of_files(where, path, *others)]
        told[where] = {what for _, what in found}
        yield from (each for each, what in found if what not in told.get(other or "", ()))
    yield from prefix_findings(PLACES.values())
    if PLACES["monitoring"].kept.exists() and not told["monitoring"]:
        yield from promql_findings()


def _of_files(where: str, *paths: Path) -> Iterator[Finding]:
    """paths: the file, and the overlay that it refers to."""
    found: list[Any] = []
    for path in paths:
        try:
            found += documents(path.read_bytes())
        except FileNotFoundError:  # `_drift` tells
            return
        except OSError as error:
            yield Finding(where, path.name, error.strerror or str(error))
            return
        except yaml.YAMLError as error:
            yield Finding(where, path.name, f"cannot be read: {error}")
            return
    yield from manifest_findings(where, found)


def manifest_findings(where: str, found: Collection[Any]) -> Iterator[Finding]:
    """One overlay as kustomize builds it. found: its documents, objects or not."""
    objects = sorted_out(where, found)
    manifests = objects.sound
    yield from objects.findings
    config = None
    for service in manifests.of_kind(RAY_SERVICE):
        try:
            content = strict_yaml.load(service["spec"]["serveConfigV2"])
            config = ServeFile.checked(Path("serveConfigV2"), content)
        except (ServingError, yaml.YAMLError) as error:
            yield Finding(where, "RayService/serveConfigV2", str(error))
    yield from hardening_findings(where, manifests, config)
    if not objects.is_whole:  # the rest is what they say of one another
        return
    yield from reference_findings(where, manifests, config)
    yield from policy_findings(where, manifests, config)
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
            is_fresh = written.exists() and written.read_bytes() == place.patch().encode()
        except ServingError as error:
            yield Finding(place.name, "settings", f"{type(error).__name__}: {error}")
            return
        if not is_fresh:
            yield Finding(place.name, "serve-config.yaml", f"is not what deploy.yaml says: run `{COMMAND}`")
    kept = place.kept.read_bytes() if place.kept.exists() else b""
    first, _, rest = kept.partition(b"\n")
    if first != digest_line().encode():
        message = f"was not built from these sources: run `{COMMAND}` where kubectl is installed"
        yield Finding(place.name, f"rendered/{place.name}.yaml", message)
    if can_build():
        try:
            is_same = build(place).encode() == rest
        except subprocess.CalledProcessError as error:
            yield Finding(place.name, "kustomization.yaml", error.stderr.strip())
            return
        if not is_same:
            yield Finding(
                place.name, f"rendered/{place.name}.yaml", f"is not what kustomize builds: run `{COMMAND}`"
            )
