"""Where readers fetch the streams of their calls: one TCP connection for each, all its streams on it.

    reader's call  --->  request, reply_to                 the call carries the request, and how it ended
    reader's connection  <---  Outlet.send(content)        what is made in between

Sending an item through Ray's call costs both ends several times as much. Who connects and names no channel
gets nothing; what is sent on one belongs to calls that named it. Binds when built, so that the endpoint
is known; listens from `start` on. A reader that is not connected is answered by its call.
Knows frames and sockets; knows neither what pieces carry nor Ray. Owner: the event loop that `start` was
called on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import TracebackType
from typing import Any, Generic, Self, cast

from cache.channel.endpoint import endpoint_of
from cache.channel.frames import (
    MAX_REQUEST_BYTES,
    Content,
    FrameReader,
    PieceFormat,
    ReplyTo,
    read_flow,
    read_hello,
    welcome,
)
from cache.errors import PiecesLost, WireError

MAX_CONNECTIONS = 256  # readers, and whoever else can reach the port
GREETING_LIMIT_S = 5.0  # who has not said by then which reader it is, is none
UNACKNOWLEDGED_LIMIT_S = 10.0  # bytes a reader's machine has not confirmed for so long never arrive
_BACKLOG = 128

logger = logging.getLogger(__name__)


class ChannelServer(Generic[Content]):
    """One process's, for one kind of pieces."""

    def __init__(self, pieces: PieceFormat[Content], host: str, port: int = 0) -> None:
        """port: 0 = a free one. Raises OSError when it cannot listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._pieces = pieces
        self.endpoint = endpoint_of(*self._socket.getsockname()[:2])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: asyncio.Task[asyncio.Server] | None = None
        self._is_closed = False
        self._connections: set[_Connection] = set()
        self._by_channel: dict[bytes, _Connection] = {}

    def start(self) -> None:
        """Listen on the running event loop. Idempotent."""
        if self._listening is None and not self._is_closed:
            self._loop = asyncio.get_running_loop()
            self._listening = self._loop.create_task(
                self._loop.create_server(lambda: _Connection(self), sock=self._socket)
            )

    def outlet(self, reply_to: ReplyTo | None) -> Outlet[Content] | None:
        """Where that call's stream goes; None = by the call itself."""
        if reply_to is None:
            return None
        channel, stream = reply_to
        connection = self._by_channel.get(channel)
        return None if connection is None else Outlet(connection, stream, self._pieces)

    def lost(self, reply_to: ReplyTo) -> asyncio.Future[None] | None:
        """Done when the connection that it names has ended; None where there is none. Not to be cancelled."""
        connection = self._by_channel.get(reply_to.channel)
        return None if connection is None else connection.lost

    def close(self) -> None:
        """End every connection and listen no more. Any thread; may be called twice."""
        self._is_closed = True
        loop = self._loop
        if loop is None or loop.is_closed():
            self._socket.close()
            return
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._close_here()
        else:
            loop.call_soon_threadsafe(self._close_here)

    def _close_here(self) -> None:
        for connection in list(self._connections):
            connection.close()
        if self._listening is not None:
            self._listening.cancel()
            if self._listening.done() and not self._listening.cancelled():
                self._listening.result().close()
        self._socket.close()

    # -- called by connections --------------------------------------------------------------------

    def _opened(self, connection: _Connection) -> bool:
        """Whether there is room for it."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def _greeted(self, connection: _Connection, channel: bytes) -> None:
        """A reader connects anew when it has lost its connection, which may not have shown here yet."""
        if (before := self._by_channel.get(channel)) is not None:
            before.close()
        self._by_channel[channel] = connection

    def _closed(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if connection.channel is not None and self._by_channel.get(connection.channel) is connection:
            del self._by_channel[connection.channel]


class Outlet(Generic[Content]):
    """One call's stream, its pieces numbered. A context manager; inside of it `send`."""

    def __init__(self, connection: _Connection, stream: int, pieces: PieceFormat[Content]) -> None:
        self._connection = connection
        self._pieces = pieces
        self._stream = stream
        self._number = 0
        self.is_paused = False  # by its reader

    def __enter__(self) -> Self:
        self._connection.outlets[self._stream] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.outlets.pop(self._stream, None)

    async def send(self, content: Content) -> None:
        """Waits while its reader, or the network, takes no more. Raises PiecesLost."""
        connection = self._connection
        while (self.is_paused or connection.is_full) and not connection.is_lost:
            await connection.change()
        if connection.is_lost:
            raise PiecesLost
        connection.send(self._pieces.encode(self._stream, self._number, content))
        self._number += 1


class _Connection(asyncio.Protocol):
    def __init__(self, server: ChannelServer[Any]) -> None:
        self._server = server
        self._frames = FrameReader(MAX_REQUEST_BYTES)
        self._unsent: list[bytes] = []
        self._changed: asyncio.Event | None = None  # there while somebody waits for a change
        self._greeting: asyncio.TimerHandle | None = None
        self.channel: bytes | None = None  # until it is greeted
        self.outlets: dict[int, Outlet[Any]] = {}
        self.is_full = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_lost(self) -> bool:
        return self.lost.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._loop = asyncio.get_running_loop()
        limit_unacknowledged(self._transport)
        if not self._server._opened(self):
            logger.warning("too many connections to a channel", extra={"limit": MAX_CONNECTIONS})
            self._transport.abort()
            return
        self._greeting = self._loop.call_later(GREETING_LIMIT_S, self.close)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                if self.channel is None:
                    self._greet(message)
                else:
                    self._take(message)
        except WireError as error:
            logger.warning("not a reader of ours, connection closed", extra={"detail": str(error)})
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._tell_change()

    def send(self, frame: bytes) -> None:
        """With whatever else is sent in this turn of the event loop: one call of the system for all."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame)

    async def change(self) -> None:
        """Returns when it is lost, takes more, or a reader has paused or resumed."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def close(self) -> None:
        self._end()
        self._transport.abort()

    def _greet(self, message: bytes) -> None:
        self.channel = read_hello(message)
        if self._greeting is not None:
            self._greeting.cancel()
        self._server._greeted(self, self.channel)
        self._transport.write(welcome())

    def _take(self, message: bytes) -> None:
        told = read_flow(message)
        if (outlet := self.outlets.get(told.stream)) is not None:  # else its call has ended
            outlet.is_paused = told.is_paused
            self._tell_change()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self.is_lost:
            self._transport.write(b"".join(unsent))

    def _end(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        if not self.lost.done():
            self.lost.set_result(None)
        self._server._closed(self)
        self._tell_change()

    def _tell_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


def limit_unacknowledged(transport: asyncio.Transport) -> None:
    """Without it a connection whose other end has vanished would look well for a quarter of an hour."""
    raw = transport.get_extra_info("socket")
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNACKNOWLEDGED_LIMIT_S))
