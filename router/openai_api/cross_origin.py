"""Which other sites' pages may ask from a browser (CORS). The origins are settings; keys are no part of it.

Without an origin that is allowed nothing changes: the browser keeps the answer from the page, and every other
client sees what it always saw. Operators' pages are never shown to other sites.
Knows ASGI; knows neither handlers nor bodies.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.config import ANY_ORIGIN
from router.openai_api.door import path_of
from router.tenants.gate import OPEN_PATHS, is_api

_METHODS = "GET, POST, DELETE"
# A browser asks before each request for as long as this is over; its own default is five seconds.
_PREFLIGHT_MAX_AGE_S = 600


class CrossOriginMiddleware:
    """Answers browsers' preflights, and tells them that a page of an allowed origin may read an answer.

    To be outside of whatever refuses: a preflight carries no key, and a page is to see errors too.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """allowed: origins as browsers send them, or `ANY_ORIGIN`."""
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_for_pages(path_of(scope)):
            await self._app(scope, receive, send)
            return
        request = Headers(scope=scope)
        granted = self._granted(request.get("origin"))
        if granted and scope["method"] == "OPTIONS" and "access-control-request-method" in request:
            await Response(status_code=204, headers={**granted, **_preflight(request)})(scope, receive, send)
            return

        async def send_granted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(granted)
                if ANY_ORIGIN not in self._allowed:
                    headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_granted)

    def _granted(self, origin: str | None) -> dict[str, str]:
        """The headers that let a page of this origin read an answer; none if it may not."""
        if ANY_ORIGIN in self._allowed:
            origin = ANY_ORIGIN
        if origin is None or origin not in self._allowed:
            return {}
        return {"access-control-allow-origin": origin, "access-control-expose-headers": "*"}


def _is_for_pages(path: str) -> bool:
    return is_api(path) or path in OPEN_PATHS


def _preflight(request: Headers) -> dict[str, str]:
    """Headers are granted as they are asked for: `*` would leave out `authorization`."""
    asked = request.get("access-control-request-headers")
    return {
        "access-control-allow-methods": _METHODS,
        "access-control-max-age": str(_PREFLIGHT_MAX_AGE_S),
        **({"access-control-allow-headers": asked} if asked else {}),
    }
