"""What a client calls its request is its name everywhere, or nowhere."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.request_ids import OneRequestId
from router.openai_api.middleware import RequestIdMiddleware

SAFE = b"Root=1-67891233-abcdef012345678912345678"


def serves(app: ASGIApp) -> ASGIApp:
    """Serve's part: whatever a client sent goes on its answer."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "Serve's own")

        async def send_with_id(message: Message) -> None:
            MutableHeaders(scope=message).append("X-Request-ID", given)
            await send(message)

        await app(scope, receive, send_with_id)

    return call


async def ids(*given: bytes) -> tuple[list[str], str]:
    """Of a request with these: those of its answer, and the Router's."""
    known, sent = [], list[Message]()

    async def router(scope: Scope, _receive: Receive, send: Send) -> None:
        known.append(scope["warmpath.request_id"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        sent.append(message)

    app = OneRequestId(serves(RequestIdMiddleware(router, echo=False)))
    headers = [(b"accept", b"*/*"), *((b"x-request-id", value) for value in given)]
    await app({"type": "http", "headers": headers}, None, send)  # type: ignore[arg-type]
    [start] = sent
    return Headers(raw=start["headers"]).getlist("x-request-id"), known[0]


@pytest.mark.parametrize("others", [(), (b"b",), (b"b c",)])
async def test_a_harmless_one_is_kept(others: tuple[bytes, ...]) -> None:
    assert await ids(SAFE, *others) == ([SAFE.decode()], SAFE.decode())


@pytest.mark.parametrize(
    "given", [[b'a b"c'], [b""], [b"x" * 129], ["ü".encode()], [b"\xfc"], [b"a b", b"b"]], ids=repr
)
async def test_any_other_is_replaced_by_one_that_the_answer_has(given: list[bytes]) -> None:
    """The answer had the client's text, and logs and debug pages an id that nobody was told."""
    [told], known = await ids(*given)
    assert told == known
    assert told.encode() not in given


async def test_where_none_was_sent_serve_makes_one() -> None:
    given: list[Any] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        given.append(scope["headers"])

    await OneRequestId(app)({"type": "http", "headers": []}, None, None)  # type: ignore[arg-type]
    assert given == [[]]
