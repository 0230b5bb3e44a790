"""What Serve's Python proxy says itself, in the API's one error shape.

Serve answers in plain text, and in its own words, what never reached a Router or was lost with one. Its words
may quote an exception, so a client gets a fixed sentence instead. Knows HTTP statuses; knows no cause.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai_api.errors import ErrorAnswer, proxy_error

_SERVES_OWN = "/-/"  # its health and routes pages: for load balancers and operators, who expect plain text


def proxy_middlewares() -> list[Middleware]:
    """For Serve, in place of `deploy.proxy.middlewares`: errors' shape alone."""
    return [Middleware(OneErrorShape)]


class OneErrorShape:
    """Replaces the body of every error that is not JSON already, which ours all are.

    When a Router dies under a request, Serve's proxy returns without having said anything, and the server
    around it would answer in plain text: that is said here too (seen in Ray 2.60).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVES_OWN):
            await self._app(scope, receive, send)
            return
        has_begun = is_replaced = False

        async def send_ours(message: Message) -> None:
            nonlocal has_begun, is_replaced
            has_begun = True
            if message["type"] == "http.response.start" and _is_foreign_error(message):
                is_replaced = True
                await _send(proxy_error(message["status"]), message, send)
            elif not is_replaced:
                await send(message)

        await self._app(scope, receive, send_ours)
        if not has_begun:
            request_id = Headers(scope=scope).get("x-request-id")
            headers = [] if request_id is None else [(b"x-request-id", request_id.encode("latin-1"))]
            start = {"type": "http.response.start", "status": 500, "headers": headers}
            await _send(proxy_error(500), start, send)


def _is_foreign_error(start: Message) -> bool:
    if start["status"] < 400:
        return False
    kind = Headers(raw=start.get("headers", [])).get("content-type", "")
    return not kind.startswith("application/json")


async def _send(answer: ErrorAnswer, start: Message, send: Send) -> None:
    """The whole answer, with Serve's own status and headers (request id, retry-after)."""
    content = answer.content()
    message = {**start, "headers": list(start.get("headers", []))}
    headers = MutableHeaders(raw=message["headers"])
    headers["content-type"] = "application/json"
    headers["content-length"] = str(len(content))
    for name, value in answer.headers.items():
        headers.setdefault(name, value)
    await send({**message, "headers": headers.raw})
    await send({"type": "http.response.body", "body": content, "more_body": False})
