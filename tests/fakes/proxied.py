"""A Router's application that answers as it is told, and clients that ask it through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

from starlette.types import Message, Receive, Scope, Send

from tests.fakes.serve_call import ProxyAndRouter

PATH = "/v1/completions"
START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-warmpath-replica", b"r")],
}


class Api:
    """The Router's application: answers with `parts`, and notes what it was asked."""

    def __init__(self) -> None:
        self.parts = [b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"]
        self.is_event_stream = True
        self.fails_after: int | None = None  # parts
        self.failure: Exception = RuntimeError("in the middle")
        self.holds_after: int | None = None
        self.holds_at_start = False
        self.status = 200
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()
        self.bodies: list[bytes] = []
        self.num_cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.bodies.append(await body(receive))
            kind = b"text/event-stream" if self.is_event_stream else b"application/json"
            if self.holds_at_start:
                self.held.set()
                await self.go_on.wait()
            headers = [(b"content-type", kind), *START["headers"][1:]]
            await send({**START, "status": self.status, "headers": headers})
            for number, part in enumerate(self.parts):
                if number == self.fails_after:
                    raise self.failure
                if number == self.holds_after:
                    self.held.set()
                    await self.go_on.wait()
                is_last = number == len(self.parts) - 1
                await send({"type": "http.response.body", "body": part, "more_body": not is_last})
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def body(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        content += message["body"]
        if not message.get("more_body"):
            return content


class Client:
    """One request's, with what came."""

    def __init__(self, line: ProxyAndRouter, content: bytes = b"{}", **fields: Any) -> None:
        self.messages: list[Message] = []
        self._unsent = [content[:1], content[1:]]
        self.sends = asyncio.Event()  # cleared: nothing after the first byte of its body
        self.sends.set()
        self._is_gone = asyncio.Event()
        self.transport = Mock()  # as a server's connection has one
        self.transport.is_closing.return_value = False
        self.takes = asyncio.Event()  # cleared: it reads nothing
        self.takes.set()
        headers = [(b"content-length", str(len(content)).encode()), (b"x-request-id", b"mine")]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, **fields}
        self.task = asyncio.create_task(self._ask(line, scope))

    async def _ask(self, line: ProxyAndRouter, scope: Scope) -> None:
        await line.app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._unsent:
            if len(self._unsent) == 1:
                await self.sends.wait()
            return {"type": "http.request", "body": self._unsent.pop(0), "more_body": bool(self._unsent)}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.takes.wait()
        self.messages.append(message)

    def go(self) -> None:
        self._is_gone.set()

    @property
    def content(self) -> bytes:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body")

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False

    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110 - what is waited for knows of no event
            await asyncio.sleep(0.002)


async def answered(line: ProxyAndRouter, content: bytes = b"{}", **fields: Any) -> Client:
    client = Client(line, content, **fields)
    async with asyncio.timeout(10):
        await client.task
    return client


async def connect(line: ProxyAndRouter) -> None:
    """The first answer tells where; the second is the first to come from there."""
    await answered(line)
    await until(lambda: line.bodies._routers.is_connected)
    await answered(line)
