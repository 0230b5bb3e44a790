"""OpenTelemetry behind our spans: one trace across processes, as the operator set it, only if asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from cache.errors import ConfigError
from cache.tracing import NO_SPAN, NoTracing
from deploy import traces
from deploy.traces import OpenTelemetry, check_exporter, open_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> OpenTelemetry:
    return OpenTelemetry(SimpleSpanProcessor(exporter), "router")


def test_a_span_goes_on_with_its_senders_trace(
    tracing: OpenTelemetry, exporter: InMemorySpanExporter
) -> None:
    ingress = tracing.begin("ingress", PARENT)
    tracing.begin("decide", ingress.traceparent, attributes={"reason": "prefix"}).end()
    ingress.end()
    decide, outer = exporter.get_finished_spans()
    assert outer.parent is not None
    assert format_span_id(outer.parent.span_id) == "b7ad6b7169203331"
    assert outer.context is not None
    assert decide.parent is not None
    assert decide.parent.span_id == outer.context.span_id
    assert {format_trace_id(span.context.trace_id) for span in (decide, outer) if span.context} == {
        "0af7651916cd43dd8448eb211c80319c"
    }
    assert dict(decide.attributes or {}) == {"reason": "prefix"}


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-01", PARENT.replace("00-0", "ff-0", 1)])
def test_without_a_parent_that_can_be_read_a_trace_begins(
    tracing: OpenTelemetry, exporter: InMemorySpanExporter, parent: str
) -> None:
    span = tracing.begin("ingress", parent)
    assert span.traceparent.startswith("00-")
    span.end()
    assert exporter.get_finished_spans()[0].parent is None


def test_a_span_ends_once_with_why(tracing: OpenTelemetry, exporter: InMemorySpanExporter) -> None:
    span = tracing.begin("decide")
    span.end("AllBusy")
    span.end()
    (ended,) = exporter.get_finished_spans()
    assert ended.status.status_code is StatusCode.ERROR
    assert (ended.attributes or {})["error.type"] == "AllBusy"


def test_times_may_be_told_afterwards(tracing: OpenTelemetry, exporter: InMemorySpanExporter) -> None:
    tracing.begin("queue", at_ns=1_000).end(at_ns=5_000)
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1_000, 5_000)


class AwayCollector(SpanExporter):
    """Takes what it is sent and says nothing."""

    def __init__(self) -> None:
        self.is_back = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_back.wait()
        return SpanExportResult.SUCCESS


def test_a_collector_that_is_away_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "CLOSE_S", 0.01)
    collector = AwayCollector()
    tracing = OpenTelemetry(BatchSpanProcessor(collector), "router")
    tracing.begin("ingress").end()
    tracing.close()
    (closing,) = [thread for thread in threading.enumerate() if thread.name == "warmpath-spans"]
    assert closing.daemon  # the process ends without it
    tracing.close()
    collector.is_back.set()
    closing.join(20.0)
    assert not closing.is_alive()


def test_what_waits_to_be_sent_is_sent_at_the_end(exporter: InMemorySpanExporter) -> None:
    tracing = OpenTelemetry(BatchSpanProcessor(exporter), "router")
    tracing.begin("ingress").end()
    tracing.close()
    assert len(exporter.get_finished_spans()) == 1


def test_the_operators_environment_rules(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    silent = OpenTelemetry(SimpleSpanProcessor(exporter), "router")
    span = silent.begin("ingress")
    assert not int(span.traceparent[-2:], 16) & 1  # others are told not to sample either
    span.tell({"a": 1})
    span.end()
    assert not exporter.get_finished_spans()
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    OpenTelemetry(SimpleSpanProcessor(exporter), "router").begin("ingress").end()
    assert exporter.get_finished_spans()[0].resource.attributes["service.name"] == "mine"


def test_it_is_named_after_its_part(tracing: OpenTelemetry, exporter: InMemorySpanExporter) -> None:
    tracing.begin("ingress").end()
    assert exporter.get_finished_spans()[0].resource.attributes["service.name"] == "warmpath-router"


def test_nobody_traces_unless_told_to() -> None:
    tracing = open_tracing(None, component="router")
    assert isinstance(tracing, NoTracing)
    assert tracing.begin("ingress", PARENT) is NO_SPAN
    assert NO_SPAN.traceparent == ""
    tracing.close()


def test_an_exporter_that_is_not_there_is_named_at_once() -> None:
    check_exporter(None, "args.router.traces")
    check_exporter("console", "args.router.traces")
    with pytest.raises(ConfigError, match=r"args\.router\.traces.*'carrier-pigeon'.*-e '\.\[otel\]'"):
        check_exporter("carrier-pigeon", "args.router.traces")


@pytest.mark.parametrize(
    ("environment", "entry"),
    [
        ({}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "otlp_proto_http",
        ),
    ],
)
def test_otlp_is_looked_for_by_its_protocol(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], entry: str
) -> None:
    """No installed package is called "otlp" alone."""
    looked_for: list[str] = []

    def none_installed(*, group: str, name: str | None = None) -> list[EntryPoint]:
        looked_for.append(name or "")
        return []

    monkeypatch.setattr(traces, "entry_points", none_installed)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError):
        check_exporter("otlp", "args.router.traces")
    assert looked_for[0] == entry


def test_it_may_be_closed_twice() -> None:
    tracing = open_tracing("console", component="router")
    tracing.close()
    tracing.close()
