"""What `k8s/monitoring` asks Prometheus: the alerts' expressions and the dashboard's."""

from __future__ import annotations

import json
from typing import Any

from k8s.manifests import Manifests
from k8s.places import PLACES, ROOT

RATE_INTERVAL = "$__rate_interval"  # Grafana puts the window in its place


def rule_groups() -> list[dict[str, Any]]:
    """As the PrometheusRule has them: what a rule file holds under `groups`."""
    (rule,) = Manifests.parse(PLACES["monitoring"].kept.read_text()).of_kind("PrometheusRule")
    found: list[dict[str, Any]] = rule["spec"]["groups"]
    return found


def alerts() -> list[dict[str, Any]]:
    return [each for group in rule_groups() for each in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "k8s" / "monitoring" / "warmpath.json").read_text())
    return found


def panel_queries() -> dict[str, str]:
    """Panel and query -> PromQL."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def expressions() -> dict[str, str]:
    """Where -> PromQL, of all of it."""
    return {each["alert"]: each["expr"] for each in alerts()} | panel_queries()
