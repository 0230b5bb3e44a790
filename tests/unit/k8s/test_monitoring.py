"""Every expression of alerts and dashboard names series and labels that a Router's /metrics has."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve._private import application_state, deployment_state  # seen in ray 2.60
from ray.serve.schema import ApplicationStatus, DeploymentStatus

from cache.errors import DeadlineExceeded
from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from k8s import promql
from k8s.manifests import Manifests
from k8s.places import ROOT
from k8s.promql import (
    alerts,
    dashboard,
    expressions,
    promql_findings,
    write_expressions,
)
from router.errors import ReplicaLost
from router.fleet.engine_series import EngineView, engine_families
from router.fleet.exposition import text
from router.fleet.report import ROUTER_LABEL, families_of, labelled
from router.openai_api.errors import OUTCOMES
from router.tenants.gate import GateStatistics
from router.tenants.tenancy import GateCollector
from tests.fakes.http import MODEL, RouterUnderTest
from tests.fakes.reports import an_engine_report
from tests.fakes.router import info, load

Series = dict[str, dict[str, set[str]]]  # name -> label -> values that were seen

KEYWORDS = frozenset(
    "sum avg min max by without on ignoring rate increase absent histogram_quantile and or unless".split()
)
STAYS_OPEN = frozenset({"router", "replica", "engine", "model_name", "le"})  # values of the fleet as it is
# Not before it happens: these series have labels, and none of their values stands in the first scrape.
BEFORE_ANY: dict[str, frozenset[str]] = {
    "warmpath_retries_total": frozenset({"why", "phase", "router"}),
    "warmpath_replica_event_lag_seconds": frozenset({"replica", "router"}),
}


# Of Ray Serve's own controller, on every node's port: name -> where it is declared, with these labels.
OF_RAY = {
    "ray_serve_application_status": (application_state, {"application"}),
    "ray_serve_deployment_status": (deployment_state, {"deployment", "application"}),
}


@pytest.fixture
async def series() -> Series:
    """What the code exports, from a Router that has served one request and heard of one engine, and one with
    API keys; and what the rules ask of Ray's."""
    async with RouterUnderTest() as router:
        await router.complete(list(range(40)), max_tokens=4)
        exported = (await router.client.get("/metrics")).text
    of_keys = families_of(GateCollector(lambda: GateStatistics(0, 0, 0, Counter(), True)).collect())
    guarded = text(labelled(of_keys, {ROUTER_LABEL: "r"}))
    engines = {ReplicaId("a"): EngineView(info(), an_engine_report())}
    found: Series = {name: {label: set() for label in labels} for name, (_, labels) in OF_RAY.items()}
    for each in (exported, guarded.decode(), text(engine_families("tiny", engines)).decode()):
        for family in text_string_to_metric_families(each):
            for name in {sample.name for sample in family.samples} or {family.name, f"{family.name}_total"}:
                found.setdefault(name, {})
            for sample in family.samples:
                for label, value in sample.labels.items():
                    found[sample.name].setdefault(label, set()).add(value)
    return found


def wrong_names(expression: str, series: Series) -> list[str]:
    """Series, labels and label values in the expression that the code does not export."""
    told = []
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"(?:by|without)\s*\(([^)]*)\)", expression))))
    bare = re.sub(r"(?:by|without)\s*\([^)]*\)|\[[^\]]*\]", " ", expression)
    used = re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?", bare)
    labels: set[str] = set()
    for name, selector in used:
        if name in KEYWORDS:
            continue
        if name not in series:
            told.append(name)
            continue
        known = series[name] | {
            label: set() for label in BEFORE_ANY.get(name, ()) if label not in series[name]
        }
        labels |= known.keys()
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
            values = value.split("|") if "~" in operator else [value]
            if label not in known:
                told.append(f"{name}{{{label}}}")
            elif label not in STAYS_OPEN or label == "le":
                told += [f'{name}{{{label}="{each}"}}' for each in values if each not in known[label]]
    return told + sorted(grouped - labels)


@pytest.mark.parametrize("name", OF_RAY)
def test_ray_exports_what_the_rules_ask_of_it(name: str) -> None:
    """Ray puts `ray_` before a name; which labels a metric has stands where it is made."""
    module, labels = OF_RAY[name]
    declared = re.search(
        rf'Gauge\(\s*"{name.removeprefix("ray_")}",.*?tag_keys=\(([^)]*)\)', inspect.getsource(module), re.S
    )
    assert declared is not None
    assert set(re.findall(r'"(\w+)"', declared[1])) == labels


def test_the_numbers_of_the_rules_are_those_of_ray() -> None:
    by_alert = {each["alert"]: each["expr"] for each in alerts()}
    failed, whole = ApplicationStatus.DEPLOY_FAILED.to_numeric(), DeploymentStatus.HEALTHY.to_numeric()
    assert by_alert["WarmpathDeployFailed"].endswith(f" == {failed}")
    assert by_alert["WarmpathNotWhole"].endswith(f" < {whole}")
    assert whole == max(each.to_numeric() for each in DeploymentStatus)


async def test_every_expression_names_what_is_there(series: Series) -> None:
    wrong = {where: wrong_names(each, series) for where, each in expressions().items()}
    assert {where: names for where, names in wrong.items() if names} == {}
    assert len(wrong) > 40


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("sum(rate(warmpath_request_total[5m]))", ["warmpath_request_total"]),
        ("sum by (outcom) (rate(warmpath_requests_total[5m]))", ["outcom"]),
        ('warmpath_requests_total{outcome="error"}', ['warmpath_requests_total{outcome="error"}']),
        ('warmpath_requests_total{outcome=~"ok|error"}', ['warmpath_requests_total{outcome="error"}']),
        ('warmpath_requests_total{code="500"}', ["warmpath_requests_total{code}"]),
        ('x_seconds_bucket{le="3"} / warmpath_router_up', ["x_seconds_bucket"]),
        ('sum(warmpath_request_seconds_bucket{le="3"})', ['warmpath_request_seconds_bucket{le="3"}']),
    ],
)
async def test_wrong_names_are_seen(series: Series, expression: str, wrong: list[str]) -> None:
    assert wrong_names(expression, series) == wrong


async def counted(router: RouterUnderTest, alert: str) -> float:
    """What the series that the alert asks for first has counted."""
    (expression,) = [each["expr"] for each in alerts() if each["alert"] == alert]
    selector = re.search(r'(\w+)\{(\w+)="(\w+)"\}', expression)
    assert selector is not None
    name, label, wanted = selector.groups()
    families = text_string_to_metric_families((await router.client.get("/metrics")).text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if sample.labels[label] == wanted)


async def test_a_client_that_nobody_can_serve_is_seen() -> None:
    """Whether there is no replica when it comes, or the last one leaves under it."""
    async with RouterUnderTest(num_replicas=1) as router:
        router.answer_with(ReplicaLost("gone"))
        assert (await router.complete()).status_code == 503
        assert await counted(router, "WarmpathNoReplica") == 1
        router.parts.routing.update_replicas({})
        assert (await router.complete()).status_code == 503
        assert await counted(router, "WarmpathNoReplica") == 2


async def test_the_share_of_refused_requests_counts_a_body_of_many_prompts_once() -> None:
    async with RouterUnderTest() as router:
        full = load(num_waiting=100_000, queued_uncached_tokens=10_000_000)
        for replica_id in router.replicas:
            router.parts.routing.on_load(replica_id, full)
        assert (await router.complete([f"prompt {number}" for number in range(16)])).status_code == 429
        assert await counted(router, "WarmpathOverloaded") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("most_s", "asked_s", "outcome"),
    [
        (None, "5", "client_deadline"),
        (60.0, "5", "client_deadline"),
        (60.0, "90", "deadline"),
        (60.0, None, "deadline"),
    ],
)
async def test_no_client_wakes_anybody_by_a_deadline_of_its_own(
    caplog: pytest.LogCaptureFixture, most_s: float | None, asked_s: str | None, outcome: str, stream: bool
) -> None:
    """Before its first token or after it. The server's own deadline does."""
    headers = {} if asked_s is None else {"x-warmpath-timeout": asked_s}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 5, "stream": stream}
    if stream and outcome == "deadline":
        outcome = "broken_stream"
    async with RouterUnderTest(request_timeout_s=most_s) as router:
        begun = [Delta("a", (65,), cached_tokens=0)] if stream else []
        router.answer_with(*begun, DeadlineExceeded(5.0, 5.1))
        await router.client.post("/v1/completions", json=body, headers=headers)
        ended = {
            each: router.metric("warmpath_requests_total", endpoint="completions", outcome=each)
            for each in OUTCOMES
        }
    assert {each for each, number in ended.items() if number} == {outcome}
    (expression,) = [each["expr"] for each in alerts() if each["alert"] == "WarmpathErrors"]
    (counting,) = re.findall(r'outcome=~"([^"]*)"', expression)
    assert (outcome in counting.split("|")) is (outcome != "client_deadline")
    logged = [record for record in caplog.records if record.message == "request failed"]
    assert bool(logged) is (outcome != "client_deadline")


async def test_who_waits_for_a_first_token_is_in_flight_and_nothing_else_moves() -> None:
    """What the alert goes by, as a Router whose replicas answer nothing exports it."""
    begun = asyncio.Event()

    async def silent(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        begun.set()
        await asyncio.Event().wait()
        yield Delta("", (), 0)

    async with RouterUnderTest() as router:
        router.follow(silent)
        asking = asyncio.create_task(router.complete())
        await begun.wait()
        exported = (await router.client.get("/metrics")).text
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    families = text_string_to_metric_families(exported)
    values = [(sample.name, sample.value) for family in families for sample in family.samples]

    def total(name: str) -> float:
        return sum(value for each, value in values if each == name)

    assert total("warmpath_requests_in_flight") == 1
    assert total("warmpath_completion_tokens_total") == 0
    assert total("warmpath_time_to_first_token_seconds_count") == 0


def test_every_alert_leads_to_its_runbook() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    headings = {heading.strip() for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    assert len(alerts()) >= 8
    for alert in alerts():
        assert alert["alert"] in headings
        assert alert["annotations"]["runbook"] == f"docs/kubernetes.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert alert["annotations"]["summary"]
        assert re.fullmatch(r"\d+m", alert["for"])


def test_expressions_have_been_shown_to_promtool() -> None:
    """PromQL's grammar: asked where promtool is installed, and elsewhere it has accepted these very ones."""
    assert [str(each) for each in promql_findings()] == []


def test_an_expression_that_promtool_has_not_seen_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no promtool
    changed = expressions() | {"WarmpathErrors": "sum(rate(warmpath_requests_total[5m])"}
    monkeypatch.setattr(promql, "expressions", lambda: changed)
    (told,) = [str(each) for each in promql_findings()]
    assert "rendered/expressions.txt: is not what alerts and dashboard ask" in told


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "ConfigMap = 0: must have one file, the dashboard"),
        ({"a": "{}", "b": "{}"}, "ConfigMap = 2: must have one file"),
        ({"a": "{"}, "must be JSON: "),
        ({"a": "{}"}, "must be as Grafana has them: the object: 'panels' is a required"),
        (
            {"a": '{"panels": [{"title": "a", "targets": [{"refId": "A", "expr": 7}]}]}'},
            "panels.0.targets.0.expr: 7 is not of type 'string'",
        ),
    ],
)
def test_what_is_no_dashboard_is_told(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    manifests = Manifests(({"kind": "ConfigMap", "data": files},))
    monkeypatch.setattr(promql, "_monitoring", lambda: manifests)
    (told,) = [str(each) for each in promql_findings()]
    assert told.startswith("monitoring: ConfigMap: ")
    assert said in told


def test_what_promtool_refuses_is_told_with_its_place_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words, as version 2.42 says them."""
    tool = tmp_path / "promtool"
    said = '1:3: group "expressions", rule 0, "expression:0": could not parse expression: 1:5: parse error'
    tool.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kept = (ROOT / "k8s" / promql.KEPT).read_text()
    (told,) = [str(each) for each in write_expressions()]
    assert told == "monitoring: WarmpathNotScraped: could not parse expression: 1:5: parse error"
    assert (ROOT / "k8s" / promql.KEPT).read_text() == kept


def test_panels_do_not_lie_on_one_another() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_what_the_page_promises_is_shown() -> None:
    """The questions that an operator comes with, each answered by a row."""
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Goodput and latency", "Prefix hits", "Load", "Routers", "Failures"]
