"""What every request goes through before a handler sees it: a request id, and a limit on its headers.

Knows ASGI; knows neither routes nor bodies. Keys have a middleware of their own (`keys.py`).
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import HeadersTooLarge
from router.openai_api.door import Door
from router.openai_api.errors import answer_to
from router.openai_api.replies import error_response
from router.openai_api.request_id import REQUEST_ID_HEADER, is_safe, new_request_id

_SCOPE_KEY = "warmpath.request_id"


def id_of(request: Request) -> str:
    """The client's name for its request, or the one it was given here."""
    request_id: str = request.scope[_SCOPE_KEY]
    return request_id


class RequestIdMiddleware:
    """Takes the client's request id, or makes one, for logs and, if told to, for the answer."""

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_SCOPE_KEY] = _given_or_new(Headers(scope=scope).get(REQUEST_ID_HEADER))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id if self._echo else send)


class HeaderLimitMiddleware:
    """Refuses a request whose headers are too large, before anything looks at them.

    Servers and proxies in front have limits of their own; not all of them do.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, door: Door) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
            if size_bytes > self._max_bytes:
                error = HeadersTooLarge(self._max_bytes, size_bytes)
                self._door.refused(scope, error)
                await error_response(answer_to(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given_or_new(given: str | None) -> str:
    """The client's, if it is harmless in a log line; else a new one."""
    return given if given is not None and is_safe(given) else new_request_id()
