"""The HTTP surface: routes, headers, and one shape for every error.

Knows HTTP and `Service`; knows nothing of Ray, routing or tokens. Every handler works through `Handling`,
so a request ends in an answer, an error object, or a cut connection, and is counted exactly once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from cache.errors import ServingError
from router.config import RouterConfig
from router.errors import InvalidField
from router.fleet.exposition import CONTENT_TYPE
from router.openai_api.answer import Answer
from router.openai_api.asked import Asked
from router.openai_api.cross_origin import CrossOriginMiddleware
from router.openai_api.dashboard import DashboardRoutes
from router.openai_api.debug import PATH as DEBUG_PATH
from router.openai_api.debug import DebugRoute
from router.openai_api.door import Door
from router.openai_api.errors import answer_to, route_error
from router.openai_api.failures import FailureMiddleware
from router.openai_api.fields import Endpoint, count_unknown
from router.openai_api.handling import TIMEOUT_HEADER, Handling, PlainRoute, Received, Tally
from router.openai_api.keys import KeyMiddleware, visit_of
from router.openai_api.middleware import HeaderLimitMiddleware, RequestIdMiddleware, id_of
from router.openai_api.prefix_routes import PrefixRoutes
from router.openai_api.replies import error_response, json_body, json_response
from router.openai_api.schema import ChatBody, CompletionBody, RequestBody, parse_chat, parse_completion
from router.openai_api.service import Service
from router.openai_api.streams import BrokenStream, SseResponse, event, unless_gone
from router.openai_api.tokenization import (
    DetokenizeBody,
    TokenizeBody,
    parse_detokenize,
    parse_tokenize,
    unknown_fields,
)
from router.placement.decision import Admittance

POLICY_HEADER = "x-warmpath-policy"
SESSION_HEADERS = ("x-session-id", "x-session-affinity")  # the first one given counts
REPLICA_HEADER = "x-warmpath-replica"
CACHED_TOKENS_HEADER = "x-warmpath-cached-tokens"
OVERLAP_HEADER = "x-warmpath-overlap-blocks"


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
    door = Door(service.metrics.requests)
    if service.tenancy.gate is not None:
        api.add_middleware(KeyMiddleware, gate=service.tenancy.gate, door=door)
    api.add_middleware(HeaderLimitMiddleware, max_bytes=service.config.limits.max_header_bytes, door=door)
    api.add_middleware(FailureMiddleware)  # inside the request id's, which its log line and answer have
    if service.config.allowed_origins:
        api.add_middleware(CrossOriginMiddleware, allowed=service.config.allowed_origins)
    api.add_middleware(RequestIdMiddleware, echo=echo_request_id)
    return api


async def _on_route_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if status == 405:
        headers = {"allow": ", ".join(_methods_at(request))}
    answer = route_error(status, request.method, request.url.path)
    return error_response(answer, headers)


def _methods_at(request: Request) -> list[str]:
    """Of all routes of this path: Starlette names those of the first."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


class _Routes:
    """The handlers. Stateless beside the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handling = Handling(service)
        self._absent = service.config.sampling_defaults

    def register(self, api: FastAPI) -> None:
        for path, handler, schema in (
            ("/v1/chat/completions", self.chat_completions, self._schema(ChatBody)),
            ("/v1/completions", self.completions, self._schema(CompletionBody)),
            ("/tokenize", self.tokenize, TokenizeBody.model_json_schema()),
            ("/detokenize", self.detokenize, DetokenizeBody.model_json_schema()),
        ):
            api.router.add_api_route(
                path,
                handler,
                methods=["POST"],
                response_model=None,
                openapi_extra=json_body(schema),
                route_class_override=PlainRoute,
            )
        PrefixRoutes(self._service, self._handling).register(api)
        api.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        # A path: model names may hold slashes.
        api.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], response_model=None)
        for path, answer in (
            ("/health", self.health),
            ("/live", self.live),
            ("/metrics", self.metrics),
            ("/version", self.version),
        ):
            api.add_api_route(path, answer, methods=["GET"], response_model=None)
        for path, answer in (("/health", self.health), ("/live", self.live)):  # as some probes ask
            api.add_api_route(path, answer, methods=["HEAD"], response_model=None, include_in_schema=False)
        if self._service.config.expose_debug:
            debug = DebugRoute(self._service.insight, self._service.config.debug_token)
            api.add_api_route(DEBUG_PATH, debug.handle, methods=["GET"], response_model=None)
        if (dashboard := self._service.dashboard()) is not None:
            DashboardRoutes.of(dashboard, self._service.config.debug_token).register(api)

    def _schema(self, kind: type[RequestBody]) -> dict[str, Any]:
        """With the defaults that hold here."""
        schema = kind.model_json_schema()
        for name, value in self._absent.items():
            schema["properties"][name]["default"] = value
        return schema

    async def chat_completions(self, request: Request) -> Response:
        async def start(body: Received) -> Answer:
            checked = await self._handling.checked(
                request, body, lambda fields, limits: parse_chat(fields, limits, self._absent)
            )
            return await self._service.chat(checked, self._asked(request, body.arrived_at))

        return await self._answer(request, Endpoint.CHAT, start)

    async def completions(self, request: Request) -> Response:
        async def start(body: Received) -> Answer:
            checked = await self._handling.checked(
                request, body, lambda fields, limits: parse_completion(fields, limits, self._absent)
            )
            return await self._service.complete(checked, self._asked(request, body.arrived_at))

        return await self._answer(request, Endpoint.COMPLETIONS, start)

    async def tokenize(self, request: Request) -> Response:
        async def handle(body: Received) -> bytes:
            self._service.metrics.unknown_fields.inc(unknown_fields(TokenizeBody, body.fields))
            parsed = await self._handling.checked(request, body, parse_tokenize)
            return await self._service.tokenize(parsed, visit_of(request))

        return await self._handling.plainly(request, Endpoint.TOKENIZE, handle)

    async def detokenize(self, request: Request) -> Response:
        async def handle(body: Received) -> bytes:
            self._service.metrics.unknown_fields.inc(unknown_fields(DetokenizeBody, body.fields))
            parsed = await self._handling.checked(request, body, parse_detokenize)
            return (await self._service.detokenize(parsed, visit_of(request))).encoded()

        return await self._handling.plainly(request, Endpoint.DETOKENIZE, handle)

    async def models(self, _request: Request) -> Response:
        return json_response(self._service.about.models().encoded())

    async def model(self, name: str) -> Response:
        try:
            return json_response(self._service.about.model(name).encoded())
        except ServingError as error:
            return error_response(answer_to(error))

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
        return JSONResponse(self._service.about.version())

    def _asked(self, request: Request, arrived_at: float) -> Asked:
        """Raises InvalidField."""
        config = self._service.config
        return Asked(
            id_of(request),
            visit_of(request),
            arrived_at,
            policy=request.headers.get(POLICY_HEADER) if config.expose_routing else None,
            session=_session_of(request),
            timeout_s=_timeout_of(request, config),
            admittance=Admittance(),
        )

    async def _answer(
        self,
        request: Request,
        endpoint: Endpoint,
        start: Callable[[Received], Awaitable[Answer]],
    ) -> Response:
        """Body in; out comes the whole answer, a stream whose first token is there, or an error object."""
        tally = self._handling.tally(request, endpoint)
        # Closes what has begun, also where this is cancelled in the very turn of the loop that it is done in.
        async with AsyncExitStack() as opened:
            try:
                with self._handling.room.place(visit_of(request).tenant) as place:
                    body = await self._handling.read(request, place)
                    self._service.metrics.unknown_fields.inc(count_unknown(endpoint, body.fields))
                    responding = self._respond(request, self._placed(body, start), tally, opened)
                    response = await unless_gone(request, responding)
            except (Exception, asyncio.CancelledError) as error:
                return self._handling.refusal(error, request, tally)
            opened.pop_all()  # a stream closes its own source
            return response

    async def _placed(self, body: Received, start: Callable[[Received], Awaitable[Answer]]) -> Answer:
        """Its prompt is tokenized then: what waits and is computed from there on takes little of it."""
        answer = await start(body)
        body.place.leave()
        return answer

    async def _respond(
        self, request: Request, begun: Awaitable[Answer], tally: Tally, opened: AsyncExitStack
    ) -> Response:
        answer = await begun
        if answer.is_stream:
            return await self._stream(request, answer, tally, opened)
        async with aclosing(answer):
            content = await answer.whole()
        tally.end("ok")
        return json_response(content, self._routing_headers(answer))

    async def _stream(
        self, request: Request, answer: Answer, tally: Tally, opened: AsyncExitStack
    ) -> Response:
        """Waits for the first token: until then a failure still has a status code of its own."""
        events = await opened.enter_async_context(aclosing(self._events(request, answer, tally)))
        limit_s = self._service.config.limits.max_unread_seconds
        return SseResponse(await anext(events), events, self._routing_headers(answer), limit_s)

    async def _events(self, request: Request, answer: Answer, tally: Tally) -> AsyncGenerator[bytes, None]:
        """A failure after the first event ends in an error event, then in BrokenStream: a cut connection."""
        has_begun = False
        try:
            async with aclosing(answer), aclosing(answer.events()) as events:
                async for content in events:
                    has_begun = True
                    yield content
            tally.end("ok")
        except Exception as error:
            tally.fail(error, has_begun=has_begun)
            if not has_begun:
                raise
            tally.log_failure(error, request)
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


def _timeout_of(request: Request, config: RouterConfig) -> float | None:
    """Seconds after which the client wants no answer any more, or nobody does; None: never.

    Raises InvalidField.
    """
    most_s, limit_s = config.request_timeout_s, config.limits.max_timeout_seconds
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return most_s
    try:
        timeout_s = math.nan if "_" in given else float(given)  # Python's own way of writing it
    except ValueError:
        timeout_s = math.nan
    if not 0.0 < timeout_s <= limit_s:
        what = f"'{TIMEOUT_HEADER}' must be seconds, above 0 and up to {limit_s}."
        raise InvalidField(TIMEOUT_HEADER, what)
    return timeout_s if most_s is None else min(timeout_s, most_s)


def _session_of(request: Request) -> str | None:
    """What the client says its requests have in common; None if it says nothing."""
    return next((value for name in SESSION_HEADERS if (value := request.headers.get(name))), None)
