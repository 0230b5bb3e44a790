"""A client that takes as little of the machine as it can: one connection, one streamed answer at a time.

Reads chunked HTTP/1.1 with server-sent events, looks at the clock when the first event comes and at
everything else when the answer is over. Knows sockets; knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.overhead.samples import Sample

_END = b"\r\n0\r\n\r\n"  # of a chunked body; events end in two line feeds, so none looks like it
_HEADERS_END = b"\r\n\r\n"
_EVENT = b"data: "
_DONE = b"data: [DONE]"


class BadAnswer(RuntimeError):
    """The server did not stream a whole answer."""


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection. `ask` as often as wanted, then `close`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._first_s: float | None = None
        self._answered: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> HttpConnection:
        connection = cls(host, port)
        await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
        return connection

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, path: str, body: bytes) -> Sample:
        """POST it and read the stream to its end. Raises BadAnswer."""
        answered = self._expect()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began_s = time.perf_counter()
        self._connected().write(head.encode() + body)
        await answered
        content = body_of(b"".join(self._pieces))
        if _DONE not in content or self._first_s is None:
            raise BadAnswer(f"no whole stream: {content[:200]!r}")
        # Without [DONE], and without the chunk that carries the usage.
        return Sample(self._first_s - began_s, content.count(_EVENT) - 2)

    def _expect(self) -> asyncio.Future[None]:
        """Done when the next answer is over."""
        self._pieces, self._first_s = [], None
        self._answered = asyncio.get_running_loop().create_future()
        return self._answered

    def _connected(self) -> asyncio.Transport:
        assert self._transport is not None, "`open` makes one that is connected"
        return self._transport

    # -- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._first_s is None and _EVENT in b"".join(self._pieces):
            self._first_s = time.perf_counter()
        is_over = data.endswith(_END) or (len(data) < len(_END) and b"".join(self._pieces).endswith(_END))
        if (is_over or _is_error(self._pieces[0])) and self._answered is not None:
            if not self._answered.done():
                self._answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(BadAnswer("the connection was closed"))


def _is_error(head: bytes) -> bool:
    return head.startswith(b"HTTP/1.1 ") and not head.startswith(b"HTTP/1.1 200")


def body_of(answer: bytes) -> bytes:
    """The body of a whole chunked answer. Raises BadAnswer for another status or form."""
    head, found, rest = answer.partition(_HEADERS_END)
    if not found or not head.startswith(b"HTTP/1.1 200"):
        raise BadAnswer(answer[:300].decode(errors="replace"))
    if b"transfer-encoding: chunked" not in head.lower():
        raise BadAnswer("the answer is not chunked")
    parts: list[bytes] = []
    while True:
        size, found, rest = rest.partition(b"\r\n")
        if not found:
            raise BadAnswer("the answer ends inside a chunk")
        length = int(size.split(b";")[0], 16)
        if not length:
            return b"".join(parts)
        parts.append(rest[:length])
        rest = rest[length + 2 :]
