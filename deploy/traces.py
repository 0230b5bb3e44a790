"""Traces in OpenTelemetry's form, where an exporter is named; the only file that imports opentelemetry.

Needs the `otel` extra. Everything but the exporter's name is set by OpenTelemetry's own environment
variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and the like.
Knows spans; knows nothing of requests.
"""

from __future__ import annotations

import os
import threading
from importlib.metadata import entry_points
from typing import Any

from cache.errors import ConfigError
from cache.tracing import Attributes, NoTracing, Span, Tracing

CLOSE_S = 3.0  # what is left to send may take so long
_EXPORTERS = "opentelemetry_traces_exporter"  # entry points, as OpenTelemetry's own configuration finds them


def check_exporter(name: str | None, field: str) -> None:
    """Raises ConfigError unless traces are off, or this exporter is installed with what it needs."""
    if name is not None:
        _exporter(name, field)


def open_tracing(exporter: str | None, *, component: str, field: str = "traces") -> Tracing:
    """component: `service.name` is "warmpath-<component>" unless OTEL_SERVICE_NAME says otherwise.

    Raises ConfigError naming `field` if the exporter is not installed.
    """
    if exporter is None:
        return NoTracing()
    make = _exporter(exporter, field)
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return OpenTelemetry(BatchSpanProcessor(make()), component)


class OpenTelemetry:
    """Spans by a provider of our own: whatever else in the process traces is left alone."""

    def __init__(self, processor: Any, component: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource({SERVICE_NAME: f"warmpath-{component}"}).merge(_from_environment(Resource.create()))
        # At exit it would wait for the collector once more.
        self._provider: Any = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Any = self._provider.get_tracer("warmpath")
        self._propagator: Any = TraceContextTextMapPropagator()

    def begin(
        self, name: str, parent: str = "", *, attributes: Attributes | None = None, at_ns: int | None = None
    ) -> Span:
        from opentelemetry.context import Context

        # An empty context, not the current one: Ray's own spans are none of ours.
        context = self._propagator.extract({"traceparent": parent}, Context()) if parent else Context()
        span = self._tracer.start_span(name, context, attributes=dict(attributes or {}), start_time=at_ns)
        return _OpenSpan(span, self._propagator)

    def close(self) -> None:
        """OpenTelemetry waits half a minute for a collector that is away, and a replica's successor may wait
        for its place: what has not been sent by then is not."""
        closing = threading.Thread(target=self._provider.shutdown, name="warmpath-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _OpenSpan:
    def __init__(self, span: Any, propagator: Any) -> None:
        self._span = span
        self._propagator = propagator

    @property
    def traceparent(self) -> str:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def tell(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str | None = None, *, at_ns: int | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not self._span.is_recording():
            return  # ended, or not sampled
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(at_ns)


def _from_environment(resource: Any) -> Any:
    """What the operator set, without the name that stands for none."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    told = dict(resource.attributes)
    if str(told.get(SERVICE_NAME, "")).startswith("unknown_service"):
        del told[SERVICE_NAME]
    return Resource(told)


def _entry_name(name: str) -> str:
    """ "otlp" stands for one of its protocols, which the operator may choose."""
    if name != "otlp":
        return name
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


def _exporter(name: str, field: str) -> Any:
    """The exporter's class, found as OpenTelemetry's own configuration does."""
    try:
        (entry,) = entry_points(group=_EXPORTERS, name=_entry_name(name))
        return entry.load()
    except (ValueError, ImportError) as error:
        known = sorted({entry.name for entry in entry_points(group=_EXPORTERS)}) or ["none is installed"]
        raise ConfigError(
            field,
            name,
            f"must be an installed OpenTelemetry exporter ({', '.join(known)}); "
            "in a clone: pip install -e '.[otel]'",
        ) from error
