"""Requests that would miss the prefix of all paths are found, and those let be that meet it otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from k8s.check import prefix_findings
from k8s.places import PLACES, ROOT, Place
from tests.unit.k8s.breaks import Break, beside, findings, serve, shipped

SCRAPES = "kind: ScrapeConfig\nmetadata:\n  namespace: warmpath\n"  # as kustomize has it


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            "monitoring/scrape-config.yaml",
            "metricsPath is /metrics; should be /llm/metrics, since route_prefix",
        ),
        ("examples/ingress.yaml", "path /v1 is outside route_prefix /llm"),
        ("examples/httproute.yaml", "path /v1 is outside route_prefix /llm"),
    ],
)
def test_what_asks_beside_the_prefix_of_all_paths_is_found(example: str, said: str) -> None:
    """Everything came up, and every scrape and request was a 404."""
    text = (ROOT / "k8s" / example).read_text().replace("kind: ScrapeConfig\nmetadata:\n", SCRAPES)
    prefixed = partial(serve, before="route_prefix: /", after="route_prefix: /llm")
    told = findings(beside("gpu", text), prefixed)
    assert [said in each for each in told] == [True]
    for path in ("/metrics", "/v1"):
        text = text.replace(f": {path}\n", f": /llm{path}\n")
    assert findings(beside("gpu", text), prefixed) == []


def test_overlays_have_one_prefix_since_they_share_what_asks_them(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("applications: [{name: warmpath, route_prefix: /llm}]")
    other = Place("other", (str(settings),))
    (found,) = prefix_findings([PLACES["cpu-demo"], PLACES["monitoring"], other])
    assert str(found).endswith("share k8s/monitoring and k8s/examples: / in cpu-demo; /llm in other")
    assert list(prefix_findings([other, replace(other, name="another")])) == []


def other_paths(things: dict[str, dict[str, Any]]) -> None:
    """Old ones that lead to those below the prefix, and an expression that takes both."""
    serve(things, "route_prefix: /", "route_prefix: /llm")
    redirected = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/llm/v1"}
    things["HTTPRoute/old"] = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "old", "namespace": "warmpath"},
        "spec": {
            "parentRefs": [{"name": "a-gateway"}],
            "rules": [
                {
                    "matches": [{"path": {"type": "RegularExpression", "value": "/(llm|old)/v1/.*"}}],
                    "backendRefs": [{"name": "warmpath-serve-svc", "port": 8000}],
                },
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "filters": [{"type": "RequestRedirect", "requestRedirect": {"path": redirected}}],
                },
            ],
        },
    }


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("gpu", other_paths),
        ("ha", lambda t: serve(t, "route_prefix: /", "route_prefix: /llm")),
    ],
)
def test_what_leads_below_the_prefix_is_fine(place: str, change: Break) -> None:
    assert findings(shipped(place), change) == []
