"""Whether what leads to the Routers asks for paths that they have: all are below the config's `route_prefix`.

Probes ask the proxies, whose own paths have no prefix. Knows paths; knows neither Services nor ports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from k8s.findings import Finding
from k8s.manifests import Manifests, named

METRICS = "/metrics"  # as Prometheus asks where a ScrapeConfig says nothing, and as a Router answers
NGINX_REWRITES = ("rewrite-target", "use-regex")  # annotations under its name
_NGINX = "nginx.ingress.kubernetes.io/"
_LEAVES = ("URLRewrite", "RequestRedirect")  # filters behind which a request has another path


def path_findings(where: str, manifests: Manifests, route_prefix: str) -> Iterator[Finding]:
    """route_prefix: of the Serve config beside these manifests."""
    for each in manifests.of_kind("ScrapeConfig"):
        path, wanted = each["spec"].get("metricsPath", METRICS), route_prefix.removesuffix("/") + METRICS
        if path != wanted:
            message = f"metricsPath is {path}; should be {wanted}, since route_prefix is {route_prefix}"
            yield Finding(where, named(each), message)
    for each in manifests.of_kind("Ingress", "HTTPRoute"):
        for path in _paths(each):
            if not _meet(PurePosixPath(path), PurePosixPath(route_prefix)):
                message = f"path {path} is outside route_prefix {route_prefix}: Routers answer it with 404"
                yield Finding(where, named(each), message)


def _paths(thing: Mapping[str, Any]) -> Iterator[str]:
    """Those that reach the Routers as they were asked for: what is rewritten may become any other, and an
    expression may take any."""
    annotations = thing["metadata"].get("annotations", {})
    if any(f"{_NGINX}{name}" in annotations for name in NGINX_REWRITES):
        return
    for rule in thing["spec"].get("rules", ()):
        for path in rule.get("http", {}).get("paths", ()):
            yield path.get("path", "/")
        if not any(each["type"] in _LEAVES for each in rule.get("filters", ())):
            paths = [match.get("path", {}) for match in rule.get("matches", ())]
            yield from [path.get("value", "/") for path in paths if path.get("type") != "RegularExpression"]


def _meet(path: PurePosixPath, prefix: PurePosixPath) -> bool:
    """Whether something below one is below the other."""
    return path.is_relative_to(prefix) or prefix.is_relative_to(path)
