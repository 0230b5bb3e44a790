"""What all handlers do with a request: count it once, read its body, and turn whatever ends it early into an
error object.

Knows HTTP and the service's counters; knows of endpoints' fields only how long they take to check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cache.errors import DeadlineExceeded, LeftUnread, ServingError
from router import cancellation
from router.errors import AnswerNotTaken, MalformedJson
from router.limits import Limits
from router.openai_api.answer import is_deadline_clients
from router.openai_api.body import parse_object, read_limited
from router.openai_api.body_room import BodyPlace, BodyRoom
from router.openai_api.errors import BROKEN_STREAM, CLIENT_DEADLINE, answer_to, outcome_of
from router.openai_api.fields import Endpoint
from router.openai_api.keys import visit_of
from router.openai_api.middleware import id_of
from router.openai_api.replies import error_response, json_response
from router.openai_api.schema import STRUCTURE_FIELDS
from router.openai_api.service import TRACEPARENT, Service
from router.openai_api.streams import ClientGone
from router.prompts.chat import json_chars
from router.prompts.prompt import OFFLOAD_CHARS

TRACE_HEADER = "traceparent"  # W3C trace context
TIMEOUT_HEADER = "x-warmpath-timeout"
GENERATING = (Endpoint.CHAT, Endpoint.COMPLETIONS)  # who asks for these may say until when
_STATUS_CLIENT_GONE = 499  # nobody reads it; it shows in access logs
_WORKED = 2  # largest bodies that are worked on at one time, as many as there are threads for prompts
# That are checked in the time in which a character is tokenized; of a structure it is one, whose notation is
# rewritten.
_BYTES_PER_CHAR = 16

T = TypeVar("T")

logger = logging.getLogger(__name__)


class PlainRoute(APIRoute):
    """A route whose handler takes the request alone and answers with a response: FastAPI has nothing to find
    out for it, and does not look. It is in the OpenAPI document like any other."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


class Tally:
    """One request in the counters and in the log. Several places may see its end: the first word wins."""

    def __init__(self, service: Service, endpoint: Endpoint, request: Request) -> None:
        self._metrics = service.metrics
        self._is_logged = service.config.log_requests
        self._endpoint = endpoint
        self._clock = service.clock
        self._request_id = id_of(request)
        self._key_name = visit_of(request).key.name
        self._started_at = service.clock()
        self._timeout, self._most_s = request.headers.get(TIMEOUT_HEADER), service.config.request_timeout_s
        self._ended = False
        self._was_clients_deadline = False  # it failed, and only because its client asked for no more time
        self._span = service.tracing.begin(
            "ingress",
            request.headers.get(TRACE_HEADER, ""),
            attributes={"request_id": self._request_id, "endpoint": endpoint.value},
        )
        # For what this task does on the request's behalf: each request is a task of its own.
        TRACEPARENT.set(self._span.traceparent)

    def fail(self, error: BaseException, *, has_begun: bool = False) -> None:
        """It ended in `error`. has_begun: some of the answer has been sent."""
        if isinstance(error, DeadlineExceeded) and self._is_deadline_clients():
            self._was_clients_deadline = True
            self.end(CLIENT_DEADLINE)
        else:
            is_broken = has_begun and not isinstance(error, LeftUnread | AnswerNotTaken)  # its client's doing
            self.end(BROKEN_STREAM if is_broken else outcome_of(error))

    def log_failure(self, error: BaseException, request: Request) -> None:
        """Say that it failed so, unless all that was too short is the time its client gave it."""
        if not self._was_clients_deadline:
            log_failure(error, request)

    def end(self, outcome: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.requests.labels(self._endpoint.value, outcome).inc()
            elapsed_s = self._clock() - self._started_at
            self._metrics.request_s.labels(self._endpoint.value).observe(elapsed_s)
            self._span.tell({"outcome": outcome})
            self._span.end(None if outcome == "ok" else outcome)
            if not self._is_logged:
                return
            logger.info(
                "request ended",
                extra={
                    "request_id": self._request_id,
                    "key": self._key_name,
                    "endpoint": self._endpoint.value,
                    "outcome": outcome,
                    "elapsed_s": round(elapsed_s, 4),
                },
            )

    def _is_deadline_clients(self) -> bool:
        """Whether the deadline of a request that had one was its client's wish. The header was checked."""
        given = self._timeout if self._endpoint in GENERATING else None
        return is_deadline_clients(None if given is None else float(given), self._most_s)


@dataclass(frozen=True, slots=True)
class Received:
    """A body as it came."""

    fields: dict[str, Any]
    num_bytes: int
    arrived_at: float  # its last byte, by the service's clock
    place: BodyPlace

    def size(self, limits: Limits) -> int:
        """Characters that take as long to tokenize as its fields to check."""
        structures = [self.fields.get(name) for name in STRUCTURE_FIELDS]
        return self.num_checked_bytes(limits) // _BYTES_PER_CHAR + json_chars(structures, OFFLOAD_CHARS)

    def num_checked_bytes(self, limits: Limits) -> int:
        """Without texts: nothing is looked for in them before they are tokenized, which has its own turn."""
        messages, texts = self.fields.get("messages"), [self.fields.get("prompt")]
        if isinstance(messages, list) and len(messages) <= limits.max_messages:
            texts += [message.get("content") for message in messages if isinstance(message, dict)]
        return self.num_bytes - sum(len(text) for text in texts if isinstance(text, str))


class Handling:
    """One Router's: it holds what there is room for, and nothing else beside the service. Build it once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config, limits = service.config, service.config.limits
        self._limits = limits
        self.room = BodyRoom(
            max(limits.max_bodies_bytes, limits.max_body_bytes),
            _WORKED * limits.max_body_bytes,
            config.max_wait_s,
            is_divided=config.tenants.has_keys,
        )
        service.metrics.watch_bodies(lambda: self.room.held_bytes)

    def tally(self, request: Request, endpoint: Endpoint) -> Tally:
        """Begins to count a request."""
        return Tally(self._service, endpoint, request)

    async def read(self, request: Request, place: BodyPlace) -> Received:
        """The body, an object; a large one in its turn. Raises ApiError and BodiesBusy."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise MalformedJson("it is compressed (content-encoding): send it as it is.")
        declared, limits = request.headers.get("content-length"), self._limits
        content = await read_limited(
            request.stream(), declared, limits.max_body_bytes, limits.max_body_pause_seconds, place.grow
        )
        if not content and "upgrade" in request.headers:  # as Java's client asks first, of plain HTTP
            raise MalformedJson(
                "it is empty. Servers drop it with a request to upgrade the connection, as HTTP/2 over plain "
                "HTTP begins: let the client send HTTP/1.1."
            )
        arrived_at = self._service.clock()
        await place.turn()
        fields = parse_object(content, limits.max_json_depth)
        return Received(fields, len(content), arrived_at, place)

    async def checked(
        self, request: Request, body: Received, parse: Callable[[Mapping[str, Any], Limits], T]
    ) -> T:
        """What `parse` makes of a body's fields: of many on a prompt's thread, where others run in between.

        Raises what it raises, and PromptsBusy.
        """
        return await self._service.soon(
            body.size(self._limits), visit_of(request), lambda: parse(body.fields, self._limits)
        )

    async def plainly(
        self, request: Request, endpoint: Endpoint, handle: Callable[[Received], Awaitable[bytes]]
    ) -> Response:
        """Body in; out comes one object, or an error object."""
        tally = self.tally(request, endpoint)
        try:
            with self.room.place(visit_of(request).tenant) as place:
                content = await handle(await self.read(request, place))
        except (Exception, asyncio.CancelledError) as error:
            return self.refusal(error, request, tally)
        tally.end("ok")
        return json_response(content)

    def refusal(self, error: BaseException, request: Request, tally: Tally) -> Response:
        """The error object for whatever ended a request before its answer began. Lets its own cancellation
        pass."""
        if isinstance(error, asyncio.CancelledError) and cancellation.is_own():
            tally.end("cancelled")
            raise error
        if isinstance(error, ClientGone | ClientDisconnect):
            tally.end("cancelled")
            return Response(status_code=_STATUS_CLIENT_GONE)
        tally.fail(error)
        tally.log_failure(error, request)
        return error_response(answer_to(error))


def log_failure(error: BaseException, request: Request) -> None:
    """Failures of ours, with their place in the code but without their text: it may quote a prompt."""
    if answer_to(error).status < 500:
        return
    fields = {"request_id": id_of(request), "error_type": type(error).__name__}
    if isinstance(error, ServingError):
        logger.warning("request failed", extra=fields)
        return
    textless = RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
    logger.error("request failed", extra=fields, exc_info=(RuntimeError, textless, error.__traceback__))
