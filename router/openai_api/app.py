"""The HTTP surface: routes, headers, and one shape for every error.

Knows HTTP and `Service`; knows nothing of Ray, routing or tokens. Every handler runs inside `_guarded`,
so a request ends in an answer, an error object, or a cut connection, and is counted exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache.errors import ServingError
from router.errors import HeadersTooLarge
from router.fleet.exposition import CONTENT_TYPE
from router.openai_api.body import parse_object, read_limited
from router.openai_api.dashboard import DashboardRoutes
from router.openai_api.debug import PATH as DEBUG_PATH
from router.openai_api.debug import DebugRoute
from router.openai_api.errors import ErrorAnswer, answer_to, outcome_of, route_error
from router.openai_api.fields import Endpoint, count_unknown
from router.openai_api.keys import KeyMiddleware, visit_of
from router.openai_api.prefixes import PrefixBody, parse_prefix
from router.openai_api.schema import ChatBody, CompletionBody, parse_chat, parse_completion
from router.openai_api.service import TRACEPARENT, Answer, Service
from router.openai_api.streams import BrokenStream, ClientGone, SseResponse, event, unless_gone
from router.openai_api.tokenization import (
    DetokenizeBody,
    TokenizeBody,
    parse_detokenize,
    parse_tokenize,
    unknown_fields,
)

POLICY_HEADER = "x-warmpath-policy"
SESSION_HEADERS = ("x-session-id", "x-session-affinity")  # the first one given counts
PREFIXES_PATH = "/v1/prefixes"
REPLICA_HEADER = "x-warmpath-replica"
CACHED_TOKENS_HEADER = "x-warmpath-cached-tokens"
OVERLAP_HEADER = "x-warmpath-overlap-blocks"
REQUEST_ID_HEADER = "x-request-id"
TRACE_HEADER = "traceparent"  # W3C trace context
_SCOPE_KEY = "warmpath.request_id"
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # it goes into logs and object ids
_STATUS_CLIENT_GONE = 499  # nobody reads it; it shows in access logs

logger = logging.getLogger(__name__)


def build_api(
    service: Service,
    *,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    echo_request_id: bool = True,
) -> FastAPI:
    """The application.

    lifespan: started and ended with the application.
    echo_request_id: False behind a proxy that puts x-request-id on answers itself, as Ray Serve's do;
        both would make two headers.
    """
    api = FastAPI(
        title="Warmpath",
        summary="An OpenAI-compatible API in front of prefix-caching replicas.",
        lifespan=lifespan,
        docs_url=None,  # the page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    _Routes(service).register(api)
    api.add_exception_handler(HTTPException, _on_route_error)
    api.add_exception_handler(RequestValidationError, _on_route_error)
    if service.tenancy.gate is not None:
        api.add_middleware(KeyMiddleware, gate=service.tenancy.gate)
    api.add_middleware(HeaderLimitMiddleware, max_bytes=service.config.limits.max_header_bytes)
    api.add_middleware(RequestIdMiddleware, echo=echo_request_id)
    return api


class RequestIdMiddleware:
    """Takes the client's request id, or makes one, for logs and, if told to, for the answer."""

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_SCOPE_KEY] = _request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id if self._echo else send)


class HeaderLimitMiddleware:
    """Refuses a request whose headers are too large, before anything looks at them.

    Servers and proxies in front have limits of their own; not all of them do.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
            if size_bytes > self._max_bytes:
                refusal = _error_response(answer_to(HeadersTooLarge(self._max_bytes, size_bytes)))
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _request_id(given: str | None) -> str:
    """The client's, if it is harmless in a log line; else a new one."""
    return given if given is not None and _SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


async def _on_route_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    answer = route_error(status, request.method, request.url.path)
    return _error_response(answer, headers)


def _error_response(answer: ErrorAnswer, headers: dict[str, str] | None = None) -> Response:
    return Response(
        answer.content(),
        status_code=answer.status,
        media_type="application/json",
        headers={**answer.headers, **(headers or {})},
    )


class _Tally:
    """One request in the counters and in the log. Several places may see its end: the first word wins."""

    def __init__(self, service: Service, endpoint: Endpoint, request: Request) -> None:
        self._metrics = service.metrics
        self._is_logged = service.config.log_requests
        self._endpoint = endpoint
        self._clock = service.clock
        self._request_id = _id_of(request)
        self._key_name = visit_of(request).key.name
        self._started_at = service.clock()
        self._ended = False
        self._span = service.tracing.begin(
            "ingress",
            request.headers.get(TRACE_HEADER, ""),
            attributes={"request_id": self._request_id, "endpoint": endpoint.value},
        )
        # For what this task does on the request's behalf: each request is a task of its own.
        TRACEPARENT.set(self._span.traceparent)

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


class _Routes:
    """The handlers. Stateless beside the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.config.limits

    def register(self, api: FastAPI) -> None:
        api.add_api_route(
            "/v1/chat/completions",
            self.chat_completions,
            methods=["POST"],
            response_model=None,
            openapi_extra=_json_body(ChatBody.model_json_schema()),
        )
        api.add_api_route(
            "/v1/completions",
            self.completions,
            methods=["POST"],
            response_model=None,
            openapi_extra=_json_body(CompletionBody.model_json_schema()),
        )
        api.add_api_route(
            "/tokenize",
            self.tokenize,
            methods=["POST"],
            response_model=None,
            openapi_extra=_json_body(TokenizeBody.model_json_schema()),
        )
        api.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            response_model=None,
            openapi_extra=_json_body(DetokenizeBody.model_json_schema()),
        )
        api.add_api_route(
            PREFIXES_PATH,
            self.create_prefix,
            methods=["POST"],
            response_model=None,
            openapi_extra=_json_body(PrefixBody.model_json_schema()),
        )
        one = f"{PREFIXES_PATH}/{{prefix_id}}"
        api.add_api_route(PREFIXES_PATH, self.prefixes, methods=["GET"], response_model=None)
        api.add_api_route(one, self.prefix, methods=["GET"], response_model=None)
        api.add_api_route(one, self.delete_prefix, methods=["DELETE"], response_model=None)
        api.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        # A path: model names may hold slashes.
        api.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], response_model=None)
        for path, handler in (
            ("/health", self.health),
            ("/live", self.live),
            ("/metrics", self.metrics),
            ("/version", self.version),
        ):
            api.add_api_route(path, handler, methods=["GET"], response_model=None)
        if self._service.config.expose_debug:
            debug = DebugRoute(self._service.insight, self._service.config.debug_token)
            api.add_api_route(DEBUG_PATH, debug.handle, methods=["GET"], response_model=None)
        if (dashboard := self._service.dashboard()) is not None:
            DashboardRoutes.of(dashboard, self._service.config.debug_token).register(api)

    async def chat_completions(self, request: Request) -> Response:
        async def start(body: dict[str, Any]) -> Answer:
            return await self._service.chat(
                parse_chat(body, self._limits),
                _id_of(request),
                self._policy_of(request),
                _session_of(request),
                visit_of(request),
            )

        return await self._answer(request, Endpoint.CHAT, start)

    async def completions(self, request: Request) -> Response:
        async def start(body: dict[str, Any]) -> Answer:
            return await self._service.complete(
                parse_completion(body, self._limits),
                _id_of(request),
                self._policy_of(request),
                _session_of(request),
                visit_of(request),
            )

        return await self._answer(request, Endpoint.COMPLETIONS, start)

    async def tokenize(self, request: Request) -> Response:
        async def handle(body: dict[str, Any]) -> bytes:
            self._service.metrics.unknown_fields.inc(unknown_fields(TokenizeBody, body))
            parsed = parse_tokenize(body, self._limits)
            return (await self._service.tokenize(parsed, visit_of(request))).encoded()

        return await self._answer_plainly(request, Endpoint.TOKENIZE, handle)

    async def detokenize(self, request: Request) -> Response:
        async def handle(body: dict[str, Any]) -> bytes:
            self._service.metrics.unknown_fields.inc(unknown_fields(DetokenizeBody, body))
            return (await self._service.detokenize(parse_detokenize(body, self._limits))).encoded()

        return await self._answer_plainly(request, Endpoint.DETOKENIZE, handle)

    async def create_prefix(self, request: Request) -> Response:
        async def handle(body: dict[str, Any]) -> bytes:
            self._service.metrics.unknown_fields.inc(unknown_fields(PrefixBody, body))
            parsed = parse_prefix(body, self._limits)
            making = self._service.prefixes.create(parsed, _id_of(request), visit_of(request))
            return (await unless_gone(request, making)).encoded()

        return await self._answer_plainly(request, Endpoint.PREFIXES, handle)

    async def prefixes(self, request: Request) -> Response:
        return _json(self._service.prefixes.listed(visit_of(request)).encoded())

    async def prefix(self, request: Request, prefix_id: str) -> Response:
        try:
            return _json(self._service.prefixes.one(prefix_id, visit_of(request)).encoded())
        except ServingError as error:
            return _error_response(answer_to(error))

    async def delete_prefix(self, request: Request, prefix_id: str) -> Response:
        tally = _Tally(self._service, Endpoint.PREFIXES, request)
        try:
            content = (await self._service.prefixes.delete(prefix_id, visit_of(request))).encoded()
        except (Exception, asyncio.CancelledError) as error:
            return self._refusal(error, request, tally)
        tally.end("ok")
        return _json(content)

    async def models(self, _request: Request) -> Response:
        return _json(self._service.models().encoded())

    async def model(self, name: str) -> Response:
        try:
            return _json(self._service.model(name).encoded())
        except ServingError as error:
            return _error_response(answer_to(error))

    async def health(self, _request: Request) -> Response:
        """Readiness: whether a request sent now would be routed with knowledge of every cache."""
        state = self._service.readiness()
        if state.reason is None:
            return JSONResponse({"status": "ready", "replicas": state.num_replicas})
        content = {"status": "not ready", "reason": state.reason, "replicas": state.num_replicas}
        return JSONResponse(content, status_code=503, headers={"retry-after": "1"})

    async def live(self, _request: Request) -> Response:
        """Liveness: the process answers. True while it drains or waits for replicas."""
        return JSONResponse({"status": "live"})

    async def metrics(self, _request: Request) -> Response:
        """Of the fleet: every Router's series and every engine's, whichever Router answers."""
        return Response(await self._service.fleet.text(), media_type=CONTENT_TYPE)

    async def version(self, _request: Request) -> Response:
        return JSONResponse(self._service.version())

    def _policy_of(self, request: Request) -> str | None:
        return request.headers.get(POLICY_HEADER) if self._service.config.expose_routing else None

    async def _answer(
        self,
        request: Request,
        endpoint: Endpoint,
        start: Callable[[dict[str, Any]], Awaitable[Answer]],
    ) -> Response:
        """Body in; out comes the whole answer, a stream whose first token is there, or an error object."""
        tally = _Tally(self._service, endpoint, request)
        # Closes what has begun, also where this is cancelled in the very turn of the loop that it is done in.
        async with AsyncExitStack() as opened:
            try:
                body = await self._read(request)
                self._service.metrics.unknown_fields.inc(count_unknown(endpoint, body))
                response = await unless_gone(request, self._respond(request, start(body), tally, opened))
            except (Exception, asyncio.CancelledError) as error:
                return self._refusal(error, request, tally)
            opened.pop_all()  # a stream closes its own source
            return response

    async def _answer_plainly(
        self, request: Request, endpoint: Endpoint, handle: Callable[[dict[str, Any]], Awaitable[bytes]]
    ) -> Response:
        """Body in; out comes one object, or an error object."""
        tally = _Tally(self._service, endpoint, request)
        try:
            content = await handle(await self._read(request))
        except (Exception, asyncio.CancelledError) as error:
            return self._refusal(error, request, tally)
        tally.end("ok")
        return _json(content)

    def _refusal(self, error: BaseException, request: Request, tally: _Tally) -> Response:
        """The error object for whatever ended a request before its answer began. Lets cancellation pass."""
        if isinstance(error, ClientGone | ClientDisconnect | asyncio.CancelledError):
            tally.end("cancelled")
            if isinstance(error, asyncio.CancelledError):
                raise error
            return Response(status_code=_STATUS_CLIENT_GONE)
        _log_failure(error, request)
        tally.end(outcome_of(error))
        return _error_response(answer_to(error))

    async def _respond(
        self, request: Request, begun: Awaitable[Answer], tally: _Tally, opened: AsyncExitStack
    ) -> Response:
        answer = await begun
        if answer.is_stream:
            return await self._stream(request, answer, tally, opened)
        async with aclosing(answer):
            content = await answer.whole()
        tally.end("ok")
        return _json(content, self._routing_headers(answer))

    async def _stream(
        self, request: Request, answer: Answer, tally: _Tally, opened: AsyncExitStack
    ) -> Response:
        """Waits for the first token: until then a failure still has a status code of its own."""
        events = await opened.enter_async_context(aclosing(self._events(request, answer, tally)))
        return SseResponse(await anext(events), events, self._routing_headers(answer))

    async def _events(self, request: Request, answer: Answer, tally: _Tally) -> AsyncGenerator[bytes, None]:
        """A failure after the first event ends in an error event, then in BrokenStream: a cut connection."""
        has_begun = False
        try:
            async with aclosing(answer), aclosing(answer.events()) as events:
                async for content in events:
                    has_begun = True
                    yield content
            tally.end("ok")
        except Exception as error:
            if not has_begun:
                tally.end(outcome_of(error))
                raise
            tally.end("broken_stream")
            _log_failure(error, request)
            yield event(answer_to(error).content())
            raise BrokenStream("the stream failed; its connection is cut") from None
        finally:
            tally.end("cancelled")

    def _routing_headers(self, answer: Answer) -> dict[str, str]:
        """Which replicas answered, and what was in their caches; {} unless the switch is on."""
        if not self._service.config.expose_routing:
            return {}
        runs = answer.generations
        replicas = dict.fromkeys(run.replica_id for run in runs if run.replica_id is not None)
        return {
            REPLICA_HEADER: ",".join(replicas),
            CACHED_TOKENS_HEADER: str(sum(run.cached_tokens or 0 for run in runs)),
            OVERLAP_HEADER: str(sum(run.overlap_blocks for run in runs)),
        }

    async def _read(self, request: Request) -> dict[str, Any]:
        content = await read_limited(
            request.stream(), request.headers.get("content-length"), self._limits.max_body_bytes
        )
        return parse_object(content, self._limits.max_json_depth)


def _id_of(request: Request) -> str:
    request_id: str = request.scope[_SCOPE_KEY]
    return request_id


def _session_of(request: Request) -> str | None:
    """What the client says its requests have in common; None if it says nothing."""
    return next((value for name in SESSION_HEADERS if (value := request.headers.get(name))), None)


def _json(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, media_type="application/json", headers=headers)


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """The request body for the OpenAPI document; handlers read it themselves, to keep one error shape."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _log_failure(error: BaseException, request: Request) -> None:
    """Failures of ours, with their place in the code but without their text: it may quote a prompt."""
    if answer_to(error).status < 500:
        return
    fields = {"request_id": _id_of(request), "error_type": type(error).__name__}
    if isinstance(error, ServingError):
        logger.warning("request failed", extra=fields)
        return
    textless = RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
    logger.error("request failed", extra=fields, exc_info=(RuntimeError, textless, error.__traceback__))
