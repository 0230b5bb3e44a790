"""From an error of ours to an OpenAI error object with its status code: one table.

Knows error types and the API's envelope; knows nothing of Ray, of where an error was raised, or of
how it is sent. Messages are ours or carry numbers and field names only, never a prompt; an error
outside the table is answered without its text, because nobody has checked what that quotes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cache import errors as shared
from router import errors

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
UNAVAILABLE = "service_unavailable_error"
TIMEOUT = "timeout_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error as a client sees it: an HTTP answer, or the last event of a stream that broke."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The OpenAI envelope."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def content(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class _Row:
    """How one error type is answered; a subclass without a row of its own takes its base's."""

    status: int
    type: str
    outcome: str  # the label in `warmpath_requests_total`: few values, so that it stays readable
    code: str | None = None  # None: the error's own `code`, where it has one
    retry_after_s: Callable[[Any], float] | None = None
    is_final: bool = False  # the API's own clients ask again after a 5xx, unless they are told not to
    ends_connection: bool = False  # the rest of the body would be awaited before its next request


_BUSY = _Row(429, RATE_LIMIT, "busy", "server_busy", lambda error: getattr(error, "retry_after_s", 1.0))

_TABLE: dict[type[BaseException], _Row] = {
    # The client's doing.
    errors.MalformedJson: _Row(400, INVALID_REQUEST, "invalid"),
    errors.HeadersTooLarge: _Row(431, INVALID_REQUEST, "invalid"),
    errors.BodyTooLarge: _Row(413, INVALID_REQUEST, "invalid"),
    errors.BodyTooSlow: _Row(408, TIMEOUT, "invalid", ends_connection=True),
    errors.UnknownModel: _Row(404, INVALID_REQUEST, "not_found"),
    errors.InvalidApiKey: _Row(401, INVALID_REQUEST, "unauthorized"),
    # No endpoint's: only pages for operators end so. It has no outcome of its own, which could never move.
    errors.NotPermitted: _Row(403, INVALID_REQUEST, "unauthorized"),
    errors.RateLimitExceeded: _Row(429, RATE_LIMIT, "limited", None, lambda error: error.retry_after_s),
    errors.PrefixNotFound: _Row(404, INVALID_REQUEST, "not_found"),
    errors.ApiError: _Row(400, INVALID_REQUEST, "invalid"),
    shared.PromptTooLong: _Row(400, INVALID_REQUEST, "invalid", "context_length_exceeded"),
    shared.StructureRefused: _Row(400, INVALID_REQUEST, "invalid", "invalid_value"),
    # It would not be read the next time either.
    shared.LeftUnread: _Row(408, TIMEOUT, "invalid", "answer_not_read", is_final=True),
    errors.AnswerNotTaken: _Row(408, TIMEOUT, "invalid", "answer_not_read", is_final=True),
    # Load: try again.
    errors.AllBusy: _BUSY,
    shared.QueueFull: _BUSY,
    errors.PromptsBusy: _BUSY,
    errors.BodiesBusy: _BUSY,
    errors.StructuresBusy: _BUSY,
    errors.NoReplica: _Row(503, UNAVAILABLE, "no_replica", "no_replica", lambda _error: 1.0),
    errors.RouterLeaves: _Row(503, UNAVAILABLE, "failed", "router_leaves", lambda _error: 1.0),
    errors.ReplicaLost: _Row(503, UNAVAILABLE, "failed", "replica_lost", lambda _error: 1.0),
    errors.RouterUnheard: _Row(503, UNAVAILABLE, "failed", "router_unheard", lambda _error: 1.0),
    # Ours.
    # Nobody waits for it any more, and what is too slow already gets three times the load by repetitions.
    shared.DeadlineExceeded: _Row(504, TIMEOUT, "deadline", "deadline_exceeded", is_final=True),
    # Asked again it would take the next replicas with it.
    errors.TooManyDeaths: _Row(500, SERVER, "failed", "too_many_deaths", is_final=True),
    # Whose doing it was cannot be told: the others of its step may be answered the next time.
    shared.ForwardFailed: _Row(500, SERVER, "failed", "forward_failed"),
    # Whatever it was met it on two replicas, before anything was computed.
    shared.AdmissionFailed: _Row(500, SERVER, "failed", "admission_failed", is_final=True),
    # Ours: what a client may send is checked before. Asked again it would be refused again.
    shared.RefusedEverywhere: _Row(500, SERVER, "failed", "refused_everywhere", is_final=True),
    # It stops, say, and nobody else could take over: a new attempt may find another replica.
    shared.RequestRefused: _Row(503, UNAVAILABLE, "failed", "refused", lambda _error: 1.0),
}
_UNKNOWN = _Row(500, SERVER, "failed", "internal_error")
_INTERNAL_MESSAGE = "The server failed to answer this request."
# These carry text from elsewhere (a traceback's line, a handle's state): clients get a fixed sentence.
_FIXED_MESSAGES: dict[type[BaseException], str] = {
    shared.ForwardFailed: "The model failed while computing this request.",
    shared.AdmissionFailed: "The server failed to take this request in.",
    shared.QueueFull: "All replicas are busy; try again later.",
    shared.RequestRefused: "The replica refused this request.",
    errors.ReplicaLost: "A replica was lost; try again.",
    shared.RefusedEverywhere: "The engine cannot compute this request.",
}

_SOON = {"retry-after": "1"}
_FINAL = {"x-should-retry": "false"}

BROKEN_STREAM = "broken_stream"
# Also after the first token: clients set it, and nothing of ours is broken.
CLIENT_DEADLINE = "client_deadline"

OUTCOMES = (
    "ok",
    "cancelled",
    BROKEN_STREAM,
    CLIENT_DEADLINE,
    *dict.fromkeys(row.outcome for row in (*_TABLE.values(), _UNKNOWN)),
)


def answer_to(error: BaseException) -> ErrorAnswer:
    """What a client is told about `error`. Never raises; an unknown error becomes a plain 500."""
    row = _row(error)
    headers = {}
    if row.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(row.retry_after_s(error))))
    if row.is_final:
        headers |= _FINAL
    if row.status == 401:
        headers["www-authenticate"] = "Bearer"
    if row.ends_connection:
        headers["connection"] = "close"
    return ErrorAnswer(
        status=row.status,
        message=_message(error, row),
        type=row.type,
        param=getattr(error, "param", None) if isinstance(error, errors.ApiError) else None,
        code=row.code or getattr(error, "code", None),
        headers=headers,
    )


def outcome_of(error: BaseException) -> str:
    """The value of the `outcome` label for a request that ended in `error`; one of `OUTCOMES`."""
    return _row(error).outcome


def _row(error: BaseException) -> _Row:
    for kind in type(error).__mro__:
        if kind in _TABLE:
            return _TABLE[kind]
    return _UNKNOWN


def _message(error: BaseException, row: _Row) -> str:
    if row is _UNKNOWN:
        return _INTERNAL_MESSAGE
    for kind in type(error).__mro__:
        if kind in _FIXED_MESSAGES:
            return _FIXED_MESSAGES[kind]
        if kind in _TABLE:
            break
    return str(error)


# Clients whose base URL lacks the /v1, or whose usual endpoint is another, show this and nothing else.
_SERVED = (
    "Answers come from POST /v1/chat/completions and /v1/completions; GET /openapi.json lists all routes."
)


def route_error(status: int, method: str, path: str) -> ErrorAnswer:
    """An answer for requests that reached no handler: wrong path, wrong method."""
    if status == 404:
        return ErrorAnswer(
            404, f"Nothing is served at {path[:200]}. {_SERVED}", INVALID_REQUEST, code="unknown_url"
        )
    if status == 405:
        return ErrorAnswer(
            405,
            f"{method[:20]} is not allowed at {path[:200]}.",
            INVALID_REQUEST,
            code="method_not_allowed",
        )
    return ErrorAnswer(status, "The request cannot be handled.", INVALID_REQUEST)


def proxy_error(status: int) -> ErrorAnswer:
    """What a proxy in front of the Routers answers itself: it knows no more than the status."""
    if status == 404:
        return ErrorAnswer(404, "Nothing is served there.", INVALID_REQUEST, code="unknown_url")
    if status == 408:
        return ErrorAnswer(408, "The request took too long.", TIMEOUT, None, "deadline_exceeded", _FINAL)
    if status == 429:
        return ErrorAnswer(
            429, "The server is busy; try again later.", RATE_LIMIT, None, "server_busy", _SOON
        )
    if status == 503:
        return ErrorAnswer(503, "No Router can take this request.", UNAVAILABLE, None, "no_router", _SOON)
    if status < 500:
        return ErrorAnswer(status, "The request cannot be handled.", INVALID_REQUEST)
    return ErrorAnswer(status, _INTERNAL_MESSAGE, SERVER, code="internal_error")
