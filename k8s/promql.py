"""PromQL of the alerts and of the dashboard, and that promtool has accepted every one of it.

Where promtool is installed it is asked. Elsewhere `rendered/expressions.txt` stands for it: what it accepted
last, so that an expression nobody has shown to it is seen without it. Knows grammar; which series there are
is the business of tests/unit/k8s/test_monitoring.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cache.errors import ConfigError
from k8s.findings import Finding
from k8s.manifests import Manifests
from k8s.places import COMMAND, PLACES
from k8s.schema_check import mistakes
from k8s.shapes import DASHBOARD

RATE_INTERVAL = "$__rate_interval"  # Grafana puts the window in its place
KEPT = "rendered/expressions.txt"


def rule_groups() -> list[dict[str, Any]]:
    """As the PrometheusRules have them: what a rule file holds under `groups`."""
    rules = _monitoring().of_kind("PrometheusRule")
    return [group for rule in rules for group in rule["spec"].get("groups", ())]


def alerts() -> list[dict[str, Any]]:
    return [each for group in rule_groups() for each in group.get("rules", ())]


def dashboard() -> dict[str, Any]:
    """As Grafana's sidecar gets it. Raises ConfigError."""
    texts = [text for each in _monitoring().of_kind("ConfigMap") for text in each.get("data", {}).values()]
    if len(texts) != 1:
        raise ConfigError("ConfigMap", len(texts), "must have one file, the dashboard")
    try:
        found: dict[str, Any] = json.loads(texts[0])
    except (ValueError, RecursionError) as error:
        raise ConfigError("ConfigMap", texts[0][:80], f"must be JSON: {error}") from None
    mistake = next(mistakes(DASHBOARD, found), None)
    if mistake is not None:
        raise ConfigError("ConfigMap", "the dashboard", f"must be as Grafana has them: {mistake}")
    return found


def _monitoring() -> Manifests:
    return Manifests.parse(PLACES["monitoring"].kept.read_text())


def panel_queries() -> dict[str, str]:
    """Panel and query -> PromQL."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def expressions() -> dict[str, str]:
    """Where -> PromQL, of all of it."""
    rules = {each.get("alert") or each.get("record", ""): str(each["expr"]) for each in alerts()}
    return rules | panel_queries()


def has_promtool() -> bool:
    return shutil.which("promtool") is not None


def promql_findings() -> Iterator[Finding]:
    """What promtool refuses, or has not been shown. Of manifests that are sound."""
    kept = PLACES["monitoring"].kept.parent.parent / KEPT
    try:
        found = expressions()
    except ConfigError as error:
        yield Finding("monitoring", "ConfigMap", str(error))
        return
    if not kept.exists() or kept.read_bytes() != expressions_text(found).encode():
        message = f"is not what alerts and dashboard ask: run `{COMMAND}` where promtool is installed"
        yield Finding("monitoring", KEPT, message)
    if has_promtool():
        yield from _refused(found)


def write_expressions() -> list[Finding]:
    """Writes them down if promtool accepts them; else returns what it says. Needs promtool."""
    found = expressions()
    refused = list(_refused(found))
    if not refused:
        (PLACES["monitoring"].kept.parent.parent / KEPT).write_text(expressions_text(found))
    return refused


def expressions_text(found: Mapping[str, str]) -> str:
    lines = [f"{where}: {' '.join(each.split())}" for where, each in found.items()]
    return "# What `promtool check rules` has accepted.\n" + "".join(f"{line}\n" for line in lines)


def _refused(found: Mapping[str, str]) -> Iterator[Finding]:
    """One rule for each, so that what it says is about that one; the alerts' own groups besides."""
    rules = [
        {"record": f"expression:{number}", "expr": each.replace(RATE_INTERVAL, "5m")}
        for number, each in enumerate(found.values())
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yaml"
        groups = [*rule_groups(), {"name": "expressions", "rules": rules}]
        file.write_text(yaml.safe_dump({"groups": groups}))
        done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    names = list(found)
    for number, reason in re.findall(r'"expression:(\d+)": (.+)', said):
        yield Finding("monitoring", names[int(number)], reason.strip())
    if "expression:" not in said:
        yield Finding("monitoring", "PrometheusRule/warmpath", said.strip())
