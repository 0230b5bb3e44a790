"""A connection to one channel server, and the readers of the streams that come on it.

Knows frames and sockets; knows neither calls nor whose server it is. Owner: the event loop it was made on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Generic, cast

from cache.channel.frames import (
    MAX_PIECE_BYTES,
    Content,
    FrameReader,
    Piece,
    PieceFormat,
    flow,
    hello,
    read_welcome,
)
from cache.channel.reader import PieceReader
from cache.errors import WireError


class ChannelConnection(asyncio.Protocol, Generic[Content]):
    """`is_open` from the server's welcome on until its end; both can be awaited."""

    def __init__(
        self, pieces: PieceFormat[Content], channel: bytes, readers: Mapping[int, PieceReader[Content]]
    ) -> None:
        """readers: of all streams of this process, by their numbers; others' pieces are nobody's any more."""
        self._pieces = pieces
        self._channel = channel
        self._readers = readers
        self._frames = FrameReader(MAX_PIECE_BYTES)
        self._bound: set[PieceReader[Content]] = set()  # whose pieces have come from here
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[bool] = loop.create_future()  # False: it ended without a welcome
        self.ended: asyncio.Future[None] = loop.create_future()
        self.is_open = False
        self.fault: WireError | None = None  # what it was closed for, by us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # a machine that vanished is missed within seconds
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._transport.write(hello(self._channel))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                if self.is_open:
                    self._take(self._pieces.decode(message))
                else:
                    read_welcome(message)
                    self.is_open = True
                    self.opened.set_result(True)
        except WireError as error:
            self.fault = error
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def flow(self, stream: int, *, is_paused: bool) -> None:
        """See `PieceSource`."""
        self._transport.write(flow(stream, is_paused=is_paused))

    def forget(self, reader: PieceReader[Content]) -> None:
        """Nobody reads it any more."""
        self._bound.discard(reader)

    def close(self) -> None:
        """At once; its readers hear of it. Idempotent."""
        self._transport.abort()
        self._end()

    def _take(self, piece: Piece[Content]) -> None:
        reader = self._readers.get(piece.stream)
        if reader is None:
            return  # its call was cancelled, and what was under way comes in now
        if not reader.has_begun:
            self._bound.add(reader)
        reader.receive(piece, self)

    def _end(self) -> None:
        self.is_open = False
        bound, self._bound = self._bound, set()
        for reader in bound:
            reader.lose()
        if not self.opened.done():
            self.opened.set_result(False)
        if not self.ended.done():
            self.ended.set_result(None)
