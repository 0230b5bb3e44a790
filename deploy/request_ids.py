"""A request has one id: the one that Serve puts on its answer is the one that its Router goes by.

Serve sends back whatever `x-request-id` a client sent, and a Router takes only what is harmless in a log
line: of anything else a client would be told an id that nobody knows. Here it is replaced before either sees
it. Behind HAProxy one that is not UTF-8 would be Serve's 500 as well (seen in Ray 2.60).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.openai_api.request_id import REQUEST_ID_HEADER, is_safe, new_request_id

_NAME = REQUEST_ID_HEADER.encode()


class OneRequestId:
    """ASGI middleware around Serve's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == _NAME]
            if given and (len(given) > 1 or not _is_taken(given[0])):
                # Of several all take the first: Serve's logs would have the last.
                name = given[0] if _is_taken(given[0]) else new_request_id().encode()
                others = [header for header in scope["headers"] if header[0] != _NAME]
                scope["headers"] = [*others, (_NAME, name)]
        await self._app(scope, receive, send)


def _is_taken(given: bytes) -> bool:
    return is_safe(given.decode("latin-1"))
