"""What is said of a request when the engine is through with it: a log line, spans.

    arrival ──queue──> admitted ──prefill──> first token ──decode──> end

Said afterwards, from the times the engine took down, so that a request being served costs nothing more. Ids,
counts and seconds; never a token. Knows requests; knows neither steps nor where lines and spans go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from cache.tracing import Tracing
from replica.engine.engine_meter import Ending
from replica.scheduling.request import Request

logger = logging.getLogger(__name__)


class RequestWatcher(Protocol):
    """Hears of every request's end. Engine thread only; must not block."""

    def ended(self, request: Request, ending: Ending, now_s: float) -> None:
        """now_s: on the engine's clock, as the request's own times are."""


class RequestLog:
    """One line per request."""

    def ended(self, request: Request, ending: Ending, now_s: float) -> None:
        logger.info("generation ended", extra={**_facts(request, ending), **_seconds(request, now_s)})


class RequestTraces:
    """Spans of those requests whose sender traces."""

    def __init__(self, tracing: Tracing, wall_clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracing = tracing
        self._wall_clock_ns = wall_clock_ns

    def ended(self, request: Request, ending: Ending, now_s: float) -> None:
        if not request.traceparent:
            return
        offset_ns = self._wall_clock_ns() - round(now_s * 1e9)  # from the engine's clock to the world's
        moments = (request.arrival_s, request.admitted_s, request.first_token_s, now_s)
        begun = [moment for moment in moments[:-1] if moment is not None]
        for name, began_s, ended_s in zip(
            ("queue", "prefill", "decode"), begun, [*begun[1:], now_s], strict=False
        ):
            span = self._tracing.begin(
                name,
                request.traceparent,
                attributes=_facts(request, ending),
                at_ns=offset_ns + round(began_s * 1e9),
            )
            is_last = ended_s == now_s
            error = ending.value if is_last and ending in (Ending.ABORTED, Ending.FAILED) else None
            span.end(error, at_ns=offset_ns + round(ended_s * 1e9))


def _facts(request: Request, ending: Ending) -> dict[str, str | int | float | bool]:
    return {
        "request_id": request.request_id,
        "outcome": ending.value,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.cached_tokens or 0,
        "output_tokens": request.num_tokens_here,
        "num_preemptions": request.num_preemptions,
    }


def _seconds(request: Request, now_s: float) -> dict[str, float]:
    """How long each part took, of those it came to."""
    parts: dict[str, float] = {}
    began_s = request.arrival_s
    for name, ended_s in (
        ("queue_s", request.admitted_s),
        ("prefill_s", request.first_token_s),
        ("decode_s", now_s),
    ):
        if ended_s is None:
            parts[name] = round(now_s - began_s, 4)
            break
        parts[name] = round(ended_s - began_s, 4)
        began_s = ended_s
    return parts
