"""Optional traces: spans of one request, from the Router's ingress to the engine.

    ingress ─┬─ tokenize                                   Router
             ├─ decide                                     Router, once per attempt
             └─ queue ── prefill ── decode                 replica, after the attempt, by the engine's clock

Here is what both sides of the border may ask of a tracer, and the one that does nothing; OpenTelemetry's
stands in `deploy/traces.py`. Attributes are ids, names and counts: never a prompt, never a key.
Knows spans; knows neither HTTP nor what a request is. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """Something that takes time. `end` it once; later calls change nothing."""

    @property
    def traceparent(self) -> str:
        """W3C trace context for what is done elsewhere on its behalf; "" where nobody traces."""

    def tell(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, error: str | None = None, *, at_ns: int | None = None) -> None:
        """error: the kind of failure it ended with. at_ns: since the epoch; None = now."""


class Tracing(Protocol):
    """Makes spans."""

    def begin(
        self, name: str, parent: str = "", *, attributes: Attributes | None = None, at_ns: int | None = None
    ) -> Span:
        """A span that has begun. parent: a traceparent; "" or one that cannot be read begins a new trace.
        at_ns: since the epoch; None = now."""

    def close(self) -> None:
        """Send what waits to be sent; takes at most a few seconds. Idempotent."""


class NoSpan:
    """Nobody looks."""

    traceparent = ""

    def tell(self, attributes: Attributes) -> None:
        pass

    def end(self, error: str | None = None, *, at_ns: int | None = None) -> None:
        pass


NO_SPAN: Span = NoSpan()


class NoTracing:
    """Traces are off: spans cost a call."""

    def begin(
        self, name: str, parent: str = "", *, attributes: Attributes | None = None, at_ns: int | None = None
    ) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass
