"""A proxy's connections to the Routers that have answered, and the streams that come on them.

A Router says with an answer where it takes connections, and is forgotten with its connection; whoever answers
next is asked anew. Knows endpoints and streams; knows neither requests nor paths.
Owner: the proxy's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets

from cache.channel.connection import ChannelConnection
from cache.channel.endpoint import address_of
from cache.channel.frames import CHANNEL_BYTES, ReplyTo
from cache.channel.reader import PieceReader
from router.bodies.body_frames import BODIES

CONNECT_LIMIT_S = 5.0  # to the Router's welcome
RETRY_S = 1.0  # after a connection that could not be made, or was lost
MAX_ROUTERS = 256

logger = logging.getLogger("ray.serve")


class RouterConnections:
    """Those to the Routers that have answered; a Router that has gone is forgotten with its connection."""

    def __init__(self) -> None:
        self._channel = secrets.token_bytes(CHANNEL_BYTES)
        self._numbers = itertools.count()
        self._readers: dict[int, PieceReader[bytes]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by endpoint
        self._num_open = 0
        self._is_told = False

    @property
    def is_connected(self) -> bool:
        """To any."""
        return self._num_open > 0

    def open(self) -> PieceReader[bytes]:
        """For one request; to be closed."""
        reader: PieceReader[bytes] = PieceReader(ReplyTo(self._channel, next(self._numbers)))
        self._readers[reader.reply_to.stream] = reader
        return reader

    def close(self, reader: PieceReader[bytes]) -> None:
        """Nobody reads it any more: what still comes is dropped."""
        self._readers.pop(reader.reply_to.stream, None)
        if isinstance(reader.source, ChannelConnection):
            reader.source.forget(reader)

    def learn(self, endpoint: str) -> None:
        """A Router is there, and this proxy is not connected to it yet. Does not block."""
        if endpoint not in self._tasks and len(self._tasks) < MAX_ROUTERS:
            self._tasks[endpoint] = asyncio.create_task(self._stay(endpoint), name=f"bodies from {endpoint}")

    async def _stay(self, endpoint: str) -> None:
        """Connected until it ends. No second attempt before its time: whoever answers next asks for it."""
        try:
            fault = await self._until_lost(endpoint)
            if fault and not self._is_told:
                self._is_told = True
                logger.warning("no connection for bodies, they come by calls: %s: %s", endpoint, fault)
            await asyncio.sleep(RETRY_S)
        finally:
            del self._tasks[endpoint]

    async def _until_lost(self, endpoint: str) -> str:
        """What was wrong with it; nothing where a Router has gone."""
        connection: ChannelConnection[bytes] | None = None
        try:
            host, port = address_of(endpoint)
            async with asyncio.timeout(CONNECT_LIMIT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: ChannelConnection(BODIES, self._channel, self._readers), host, port
                )
                if not await connection.opened:
                    return str(connection.fault or "it was refused")
            self._is_told = False
            self._num_open += 1
            try:
                await connection.ended
            finally:
                self._num_open -= 1
            return str(connection.fault or "")
        except (OSError, TimeoutError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if connection is not None:
                connection.close()
