"""The Router's end: event streams go to the proxy that asked over its connection, and Serve's call ends them.

    call                                                      start and last part
    channel   start ── part 1 ── part 2 ── part 3 ── … ── end

The call says the start once more: Serve's proxy wants to know how it was answered. An answer that is one
message, and every one for a proxy that is not connected, goes by the call as if nothing had been said.
Knows ASGI and streams of bytes; knows nothing of what they say. Source: docs/design/027-body-channel.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache.channel.frames import ReplyTo
from cache.channel.server import ChannelServer, Outlet
from cache.errors import PiecesLost
from router.bodies.body_frames import (
    BODIES_AT_HEADER,
    BODY_HEADER,
    BY_CALL,
    BY_CHANNEL,
    DROPPED,
    END,
    REPLY_TO_HEADER,
    REQUEST_BODY_KEY,
    read_reply_to,
    start_content,
)
from router.bodies.request_body import with_body
from router.errors import AnswerNotTaken

# Of a body whose answer has failed: the proxy may still be reading what came before.
END_LIMIT_S = 5.0
_MAX_PIECE_BYTES = 1 << 20
_EVENT_STREAM = b"text/event-stream"


@dataclass(slots=True)
class BodyStatistics:
    """For metrics: event streams for proxies that take them by channel."""

    by_channel: int = 0
    by_call: int = 0  # for want of a connection


def proxies_take_bodies(environment: Mapping[str, str]) -> bool:
    """Whether Serve's proxies here can have middlewares of ours, and may be sent to in the clear."""
    is_python = environment.get("RAY_SERVE_ENABLE_HA_PROXY", "0") != "1"
    has_middlewares = bool(environment.get("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"))
    is_encrypted = environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return is_python and has_middlewares and not is_encrypted


class BodiesByChannel:
    """ASGI middleware: nothing between it and Serve may hold messages back or change bodies."""

    def __init__(
        self,
        app: ASGIApp,
        server: ChannelServer[bytes],
        statistics: BodyStatistics,
        on_whole: Callable[[Receive, asyncio.Future[None]], None],
    ) -> None:
        """on_whole: told the `receive` of a request whose body has come with it, before anything waits, and
        what is done when the proxy that it came from is lost."""
        self._app = app
        self._on_whole = on_whole
        self._server = server
        self._statistics = statistics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, headers = dict(scope), scope["headers"]
        asked = _header(headers, REPLY_TO_HEADER)
        reply_to = None if asked is None else read_reply_to(asked)
        if (content := scope.pop(REQUEST_BODY_KEY, None)) is not None:
            if reply_to is not None and (lost := self._server.lost(reply_to)) is not None:
                self._on_whole(receive, lost)
            receive = with_body(content, receive)
        # What the proxy has added is not the client's: it counts towards no limit.
        scope["headers"] = [header for header in headers if header[0] != REPLY_TO_HEADER]
        if asked is None:
            await self._app(scope, receive, send)
        else:
            await self._answer(scope, receive, send, reply_to)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, reply_to: ReplyTo | None) -> None:
        """For a proxy that takes bodies. reply_to: None where what it asked with cannot be read."""
        with contextlib.ExitStack() as stack:
            answer = _Answer(self._server, reply_to, self._statistics, send, stack)
            answer.request_id = _header(scope["headers"], b"x-request-id")
            try:
                await self._app(scope, receive, answer.send)
            except AnswerNotTaken:
                await answer.drop()
                raise
            except Exception:
                await answer.break_off()
                raise


class _Answer:
    """One answer on its way to the proxy."""

    def __init__(
        self,
        server: ChannelServer[bytes],
        reply_to: ReplyTo | None,
        statistics: BodyStatistics,
        send: Send,
        stack: contextlib.ExitStack,
    ) -> None:
        self._server = server
        self._reply_to = reply_to
        self._statistics = statistics
        self._send = send
        self._stack = stack
        self._outlet: Outlet[bytes] | None = None
        self._start: Message | None = None  # for the call to say, when all before the last part has gone
        self.request_id: bytes | None = None

    async def send(self, message: Message) -> None:
        """Raises PiecesLost."""
        if message["type"] == "http.response.start":
            message = self._begin(message)
            if self._outlet is not None:
                self._start = message
                await self._outlet.send(start_content(self._with_id(message)))
                return
        elif self._outlet is not None and message["type"] == "http.response.body":
            if message.get("more_body", False):
                await _send_whole(self._outlet, message.get("body", b""))
                return
            await self._outlet.send(END)
            self._outlet = None
            await self._tell_start(BY_CHANNEL)
        await self._send(message)

    async def break_off(self) -> None:
        """What was sent is all there is. The call says that it had begun, before it says that it failed."""
        if self._outlet is not None and self._start is not None:
            with contextlib.suppress(PiecesLost, TimeoutError):
                async with asyncio.timeout(END_LIMIT_S):
                    await self._outlet.send(END)
            await self._tell_start(BY_CHANNEL)

    async def drop(self) -> None:
        """The client takes nothing of what was sent: the proxy need not wait for it any longer."""
        if self._outlet is not None and self._start is not None:
            await self._tell_start(DROPPED)

    async def _tell_start(self, how: bytes) -> None:
        """By the call. how: the body has gone."""
        assert self._start is not None
        await self._send({**self._start, "headers": [*self._start["headers"], (BODY_HEADER, how)]})

    def _begin(self, start: Message) -> Message:
        headers = list(start.get("headers", ()))
        outlet = self._server.outlet(self._reply_to)
        if outlet is None:
            headers.append((BODIES_AT_HEADER, self._server.endpoint.encode()))
        if _is_event_stream(headers):
            if outlet is None:
                self._statistics.by_call += 1
            else:
                self._statistics.by_channel += 1
                self._outlet = self._stack.enter_context(outlet)
        if self._outlet is None:
            headers.append((BODY_HEADER, BY_CALL))
        return {**start, "headers": headers}

    def _with_id(self, start: Message) -> Message:
        """As Serve's proxy makes it of what comes by the call."""
        if self.request_id is None:
            return start
        return {**start, "headers": [*start["headers"], (b"x-request-id", self.request_id)]}


async def _send_whole(outlet: Outlet[bytes], content: bytes) -> None:
    for begin in range(0, len(content), _MAX_PIECE_BYTES):
        await outlet.send(content[begin : begin + _MAX_PIECE_BYTES])


def _is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in headers)


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first one of this name, in lower case; None if there is none."""
    return next((value for each, value in headers if each == name), None)
