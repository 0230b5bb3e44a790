"""`GET /dashboard`: the live page, and `GET /dashboard/data`, what fills it every second.

Served only with `dashboard: true`. With API keys both are for operators (`keys.py`), and a browser asks for
one. Without, the page is for anybody who reaches the port, for it holds nothing about this service; its data
is for who may read `/debug/route`, and the page asks for their token. Knows HTTP, neither numbers nor looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.dashboard.page import Page, load_page
from router.dashboard.view import Dashboard
from router.insight.recent_traffic import SPANS
from router.openai_api.debug import may_read, refusal, unauthorized

PAGE_PATH = "/dashboard"
DATA_PATH = "/dashboard/data"

_ENCODER = msgspec.json.Encoder()
_MAX_NAME_CHARS = 64
_MAX_DIGITS = 18
_COMMON_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


@dataclass(frozen=True, slots=True)
class DashboardRoutes:
    """The handlers."""

    dashboard: Dashboard
    token: str | None  # None: whoever reaches the port may read
    page: Page

    @classmethod
    def of(cls, dashboard: Dashboard, token: str | None) -> DashboardRoutes:
        return cls(dashboard, token, load_page())

    def register(self, api: FastAPI) -> None:
        for path, handler in ((PAGE_PATH, self.show), (DATA_PATH, self.data)):
            api.add_api_route(path, handler, methods=["GET"], response_model=None, include_in_schema=False)

    async def show(self, request: Request) -> Response:
        headers = {
            **_COMMON_HEADERS,
            "cache-control": "no-cache",  # kept, and asked about each time: a new version shows at once
            "etag": self.page.etag,
            "content-security-policy": self.page.security_policy,
            "x-frame-options": "DENY",
        }
        if request.headers.get("if-none-match") == self.page.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.page.content, media_type="text/html; charset=utf-8", headers=headers)

    async def data(self, request: Request) -> Response:
        """Query: `span` (0: five minutes, 1: an hour); `router` and `cursor` of the last answer."""
        if not may_read(request, self.token):
            return unauthorized()
        query = request.query_params
        span, cursor = _number(query.get("span", "0")), _number(query.get("cursor", "0"))
        if span is None or span >= len(SPANS):
            return refusal(400, f"'span' must be below {len(SPANS)}.", "invalid_value", "span")
        if cursor is None:
            return refusal(400, "'cursor' must be a number.", "invalid_value", "cursor")
        router = query.get("router", "")[:_MAX_NAME_CHARS]
        view = self.dashboard.view(span=span, router=router, cursor=cursor)
        return Response(
            _ENCODER.encode(view),
            media_type="application/json",
            headers={**_COMMON_HEADERS, "cache-control": "no-store"},
        )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
