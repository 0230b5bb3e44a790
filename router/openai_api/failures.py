"""The last thing between a failure and the server: an error object, whichever path it was on.

What handlers raise that no table of theirs foresaw would otherwise be answered in plain text by the
framework, and logged by the server with whatever text it carries. Knows ASGI and error answers; knows no
routes.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import cancellation
from router.openai_api.errors import answer_to
from router.openai_api.handling import log_failure
from router.openai_api.replies import error_response


class FailureMiddleware:
    """Answers for what fails before its answer begins, and logs it once, with its request id: also where
    something it waited for was cancelled, which servers answer in plain text.

    A failure later passes: the server then cuts the connection, and nobody takes what came for the whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_and_know(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_know)
        except (Exception, asyncio.CancelledError) as error:
            if has_begun or (isinstance(error, asyncio.CancelledError) and cancellation.is_own()):
                raise
            log_failure(error, Request(scope))
            await error_response(answer_to(error))(scope, receive, send)
