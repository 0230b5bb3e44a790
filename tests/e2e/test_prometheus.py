"""A real Prometheus scrapes a real deployment: every panel shows something, alerts are evaluated, one fires.

Rules and queries are those that `k8s/monitoring` installs. Waits are shortened: a scrape each second, windows
of half a minute, and alerts that need not last.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.ports import free_base
from k8s.manifests import Manifests
from k8s.places import PLACES
from k8s.promql import RATE_INTERVAL, alerts, panel_queries, rule_groups
from tests.servers import Server, running_server, stop

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

WINDOW = "30s"
LIMIT_S = 90.0
FIRES = "WarmpathNotScraped"


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    client: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant vector. Raises httpx.HTTPStatusError for what it cannot evaluate."""
        answer = self.client.get("/api/v1/query", params={"query": expression}).raise_for_status().json()
        assert answer["data"]["resultType"] == "vector"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def rules(self) -> dict[str, dict[str, Any]]:
        """Alert -> its state, and whether evaluating it went well."""
        groups = self.client.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def firing(self) -> set[str]:
        return {name for name, rule in self.rules().items() if rule["state"] == "firing"}


@contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Scrapes `target` each second and evaluates the project's rules."""
    (scrape,) = Manifests.parse(PLACES["monitoring"].kept.read_text()).of_kind("ScrapeConfig")
    groups = [
        {**group, "rules": [{**rule, "for": "0s"} for rule in group["rules"]]} for group in rule_groups()
    ]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    (static,) = scrape["spec"]["staticConfigs"]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": static["labels"]["job"],
                "metrics_path": scrape["spec"]["metricsPath"],
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_base()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (
        (folder / "prometheus.log").open("w") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            until(lambda: _is_ready(client), lambda: (folder / "prometheus.log").read_text())
            yield Prometheus(client)
        finally:
            process.terminate()
            process.wait(30)


def until(is_so: Callable[[], bool], told: Callable[[], object]) -> None:
    """told: what is said when it never is."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, told()
        time.sleep(0.5)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask(server: Server, content: str, max_tokens: int = 8) -> None:
    message = [{"role": "user", "content": content}]
    body = {
        "model": "tiny",
        "messages": message,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def lose_a_replica_mid_stream(server: Server) -> None:
    """The process that writes an answer is killed; the answer goes on elsewhere to its end."""
    body = {
        "model": "tiny",
        "prompt": "once upon a time",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    pids = {each["replica_id"]: each["pid"] for each in server.version()["replicas"]}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            next(events)
        os.kill(pids[answer.headers["x-warmpath-replica"]], signal.SIGKILL)
        *_, last, done = events
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def traffic(server: Server) -> None:
    """Prompts with a beginning in common, several at once."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: ask(server, f"{'a shared beginning ' * 20}{n % 5} and {n}"), range(20)))


def empty_panels(prometheus: Prometheus) -> list[str]:
    """Queries without a single number."""
    return [
        where
        for where, expression in panel_queries().items()
        if not any(
            math.isfinite(float(sample["value"][1]))
            for sample in prometheus.query(expression.replace(RATE_INTERVAL, WINDOW))
        )
    ]


def test_every_panel_shows_something_and_alerts_are_evaluated_and_fire(tmp_path: Path) -> None:
    with (
        running_server() as server,
        running_prometheus(tmp_path, server.url.removeprefix("http://")) as prometheus,
    ):
        until(lambda: bool(prometheus.query("warmpath_router_up == 1")), lambda: "it was never scraped")
        lose_a_replica_mid_stream(server)
        empty: list[str] = []

        def all_show() -> bool:
            traffic(server)  # what is a rate needs two scrapes with something between them
            empty[:] = empty_panels(prometheus)
            return not empty

        until(all_show, lambda: f"empty: {empty}")
        for alert in alerts():
            prometheus.query(alert["expr"])
        rules = prometheus.rules()
        assert rules.keys() == {alert["alert"] for alert in alerts()}
        until(
            lambda: {rule["health"] for rule in prometheus.rules().values()} == {"ok"},
            lambda: {name: rule.get("lastError") for name, rule in prometheus.rules().items()},
        )
        assert FIRES not in prometheus.firing()
        stop(server.process)
        until(lambda: FIRES in prometheus.firing(), prometheus.rules)
