"""API keys at the door: nothing behind it sees a request that may not pass.

Closed by default: whatever is not in `gate.OPEN_PATHS` needs a key, routes that do not exist yet included.
Knows HTTP and the gate; knows no handlers. Handlers find whose request it is with `visit_of`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError
from router.openai_api.door import Door, path_of
from router.openai_api.errors import answer_to
from router.tenants.allowance import OPEN_VISIT, Visit
from router.tenants.gate import OPEN_PATHS, Gate, is_browsed
from router.tenants.key_table import ApiKey

_SCOPE_KEY = "warmpath.visit"


def visit_of(request: Request) -> Visit:
    """Whose request it is, and what they may still take; `OPEN_VISIT` where nobody needs a key."""
    visit: Visit = request.scope.get(_SCOPE_KEY, OPEN_VISIT)
    return visit


class KeyMiddleware:
    """Lets requests with a valid key through, within its limits; answers the others itself.

    Only what may have something computed (POST) counts against limits.
    """

    def __init__(self, app: ASGIApp, gate: Gate, door: Door) -> None:
        self._app = app
        self._gate = gate
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and path_of(scope) in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        key: ApiKey | None = None
        try:
            key = self._gate.authenticate(_values(scope, b"authorization"), path_of(scope))
            visit = self._gate.enter(key) if scope.get("method") == "POST" else Visit(key)
        except ApiError as error:
            await self._refuse(error, key, scope, receive, send)
            return
        scope[_SCOPE_KEY] = visit

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = [(name.encode(), value.encode()) for name, value in visit.headers().items()]
                message = {**message, "headers": [*message.get("headers", ()), *limits]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            visit.close()

    async def _refuse(
        self, error: ApiError, key: ApiKey | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403
            return
        self._door.refused(scope, error)
        answer = answer_to(error)
        if answer.status == 401 and is_browsed(path_of(scope)):
            answer.headers["www-authenticate"] = 'Basic realm="Warmpath: an operator\'s API key as password"'
        limits = self._gate.limits_left(key) if key is not None else {}
        response = Response(
            answer.content(),
            status_code=answer.status,
            media_type="application/json",
            headers={**answer.headers, **limits},
        )
        await response(scope, receive, send)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    """Of all headers of that name."""
    return [value for header, value in scope["headers"] if header == name]
