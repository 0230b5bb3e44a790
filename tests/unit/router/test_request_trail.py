"""What a request leaves in the Router's logs and traces: its id everywhere, its text nowhere."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cache.log_fields import fields_of
from deploy.traces import OpenTelemetry
from router.errors import ReplicaLost
from tests.fakes.http import RouterUnderTest

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "xylophone-quartz"
HEADERS = {"x-request-id": "mine-1", "traceparent": PARENT}


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest(log_requests=True) as router:
        yield router


@pytest.fixture
def exporter(router: RouterUnderTest) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    tracing = OpenTelemetry(SimpleSpanProcessor(exporter), "router")
    router.parts.service.tracing = router.parts.dispatcher.tracing = tracing
    return exporter


async def ask(router: RouterUnderTest, **fields: object) -> int:
    body = {"model": "tiny", "prompt": CANARY, "max_tokens": 5, **fields}
    return (await router.client.post("/v1/completions", json=body, headers=HEADERS)).status_code


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_every_line_about_a_request_names_it(
    router: RouterUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    router.answer_with(ReplicaLost("gone"))
    assert await ask(router) == 500  # both have died under it
    lines = [
        (record.message, fields_of(record)) for record in caplog.records if record.name.startswith("router")
    ]
    about = [(message, fields) for message, fields in lines if message != "tokenizing whole prompts"]
    assert {message for message, _ in about} >= {
        "request placed",
        "retrying elsewhere",
        "request failed",
        "request ended",
    }
    assert all(str(fields["request_id"]).startswith("mine-1") for _, fields in about)
    assert CANARY not in caplog.text
    placed = [fields for message, fields in about if message == "request placed"]
    assert [fields["attempt"] for fields in placed] == [0, 1]
    assert {"replica_id", "reason", "policy", "overlap_blocks", "waited_s"} <= placed[0].keys()


async def test_without_the_setting_only_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with RouterUnderTest() as router:
        caplog.set_level(logging.INFO, "router")
        caplog.clear()
        assert await ask(router) == 200
        assert not [record for record in caplog.records if record.name.startswith("router")]


async def test_spans_hang_under_the_clients_and_carry_on_to_the_replica(
    router: RouterUnderTest, exporter: InMemorySpanExporter
) -> None:
    assert await ask(router) == 200
    spans = by_name(exporter)
    assert set(spans) == {"ingress", "tokenize", "decide"}
    ingress = spans["ingress"].context
    assert ingress is not None
    assert f"{ingress.trace_id:032x}" in PARENT
    for name in ("tokenize", "decide"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == ingress.span_id
    ((_, request),) = router.calls.requests
    assert request.traceparent == f"00-{ingress.trace_id:032x}-{ingress.span_id:016x}-01"
    decided = spans["decide"].attributes or {}
    assert (decided["reason"], decided["matched_tokens"], decided["attempt"]) == ("cold", 0, 0)
    assert decided["replica_id"] in router.replicas
    assert (spans["ingress"].attributes or {})["outcome"] == "ok"
    assert CANARY not in str([span.to_json() for span in spans.values()])


async def test_a_stream_is_traced_to_its_end(router: RouterUnderTest, exporter: InMemorySpanExporter) -> None:
    assert await ask(router, stream=True) == 200
    assert (by_name(exporter)["ingress"].attributes or {})["outcome"] == "ok"


async def test_each_prompt_of_a_batch_is_decided_under_the_same_span(
    router: RouterUnderTest, exporter: InMemorySpanExporter
) -> None:
    assert await ask(router, prompt=["one", "two", "three"]) == 200
    spans = [span for span in exporter.get_finished_spans() if span.name == "decide"]
    assert len({(span.attributes or {})["request_id"] for span in spans}) == 3
    assert len({span.parent.span_id for span in spans if span.parent}) == 1


async def test_spans_say_what_failed(router: RouterUnderTest, exporter: InMemorySpanExporter) -> None:
    router.parts.routing.update_replicas({})
    router.parts.service.max_model_len = lambda: 100  # type: ignore[method-assign]
    assert await ask(router) == 503
    spans = by_name(exporter)
    assert (spans["decide"].attributes or {})["error.type"] == "NoReplica"
    assert (spans["ingress"].attributes or {})["error.type"] == "no_replica"


async def test_nobody_is_told_of_a_trace_that_is_not_taken(router: RouterUnderTest) -> None:
    assert await ask(router) == 200
    ((_, request),) = router.calls.requests
    assert request.traceparent == ""
