"""`GET /debug/route`: the latest decisions, one by its id, and the sums behind them.

Served only with `expose_debug: true`; with `debug_token` set, only to who sends it. Ids and numbers, no
prompt. Knows HTTP and `Insight`; words are made by `python -m router`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.insight.debug_view import MAX_LAST
from router.insight.insight import Insight
from router.openai_api.errors import INVALID_REQUEST, ErrorAnswer

PATH = "/debug/route"
DEFAULT_LAST = 20

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class DebugRoute:
    """The handler. Query: `request_id` for one request, or `last`, how many of the latest."""

    insight: Insight
    token: str | None  # None: whoever reaches the port may read

    async def handle(self, request: Request) -> Response:
        if not may_read(request, self.token):
            return unauthorized()
        request_id = request.query_params.get("request_id")
        if request_id is not None:
            page = self.insight.find(request_id)
            if page is None:
                return self._unknown()
        else:
            last = _count(request.query_params.get("last", str(DEFAULT_LAST)))
            if last is None:
                return refusal(
                    400, f"'last' must be an integer between 0 and {MAX_LAST}.", "invalid_value", "last"
                )
            page = self.insight.latest(last)
        return Response(
            _ENCODER.encode(page), media_type="application/json", headers={"cache-control": "no-store"}
        )

    def _unknown(self) -> Response:
        """Which Router said so, of how many, is in headers: another one may know the request."""
        response = refusal(
            404, "This Router does not remember that request.", "request_not_found", "request_id"
        )
        response.headers["x-warmpath-router"] = self.insight.name
        response.headers["x-warmpath-routers"] = str(self.insight.num_routers)
        return response


def may_read(request: Request, token: str | None) -> bool:
    """Whether who asks has sent the token; None: there is none, whoever reaches the port may read."""
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), token.encode())


def unauthorized() -> Response:
    """The answer to who may not read."""
    return refusal(401, "This page needs its token: authorization: Bearer <debug_token>.", "unauthorized")


def _count(text: str) -> int | None:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        return None
    return int(text) if int(text) <= MAX_LAST else None


def refusal(status: int, message: str, code: str, param: str | None = None) -> Response:
    """An error object of this shape."""
    answer = ErrorAnswer(status, message, INVALID_REQUEST, param=param, code=code)
    return Response(answer.content(), status_code=status, media_type="application/json")
