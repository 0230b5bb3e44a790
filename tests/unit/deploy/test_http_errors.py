"""Serve's own errors get the API's shape; everything else passes as it is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from deploy.http_errors import OneErrorShape

SECRET = "Traceback: a secret prompt"


async def _plain(request: Request) -> Response:
    headers = {"x-request-id": "r", **({"retry-after": "7"} if "retry" in request.query_params else {})}
    return PlainTextResponse(SECRET, status_code=int(request.path_params["status"]), headers=headers)


async def _ours(_request: Request) -> Response:
    return JSONResponse({"error": "ours"}, status_code=500)


async def _stream(_request: Request) -> Response:
    async def content() -> Any:
        yield b"a"
        yield b"b"

    return StreamingResponse(content(), media_type="text/event-stream")


@pytest.fixture
def client() -> httpx.AsyncClient:
    routes = [
        Route("/plain/{status}", _plain),
        Route("/-/healthz", lambda _request: PlainTextResponse("draining", status_code=503)),
        Route("/ours", _ours),
        Route("/stream", _stream),
    ]
    app = OneErrorShape(Starlette(routes=routes))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (404, "invalid_request_error", "unknown_url"),
        (408, "timeout_error", "deadline_exceeded"),
        (418, "invalid_request_error", None),
        (429, "rate_limit_error", "server_busy"),
        (500, "server_error", "internal_error"),
        (503, "service_unavailable_error", "no_router"),
    ],
)
async def test_a_plain_error_gets_the_shape_and_loses_its_words(
    client: httpx.AsyncClient, status: int, kind: str, code: str | None
) -> None:
    answer = await client.get(f"/plain/{status}")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, code)
    assert SECRET not in answer.text
    assert answer.headers["x-request-id"] == "r"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    assert ("x-should-retry" in answer.headers) is (status == 408)


async def test_serves_own_retry_after_stays(client: httpx.AsyncClient) -> None:
    assert (await client.get("/plain/503?retry")).headers.get_list("retry-after") == ["7"]


async def test_everything_else_passes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/plain/200")).text == SECRET
    assert (await client.get("/ours")).json() == {"error": "ours"}
    assert (await client.get("/stream")).text == "ab"
    assert (await client.get("/-/healthz")).text == "draining"


async def test_an_application_that_says_nothing_is_a_500() -> None:
    async def silent(_scope: Any, _receive: Any, _send: Any) -> None:
        return

    transport = httpx.ASGITransport(OneErrorShape(silent))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        answer = await client.get("/v1/models", headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"


async def test_a_stream_that_breaks_off_stays_broken() -> None:
    """Nothing is added to it that would make it look whole."""

    async def broken(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    await OneErrorShape(broken)(scope, None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"]
