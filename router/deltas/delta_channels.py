"""This Router's connections to all replicas' delta servers, kept up, and the streams that come on them.

A replica that cannot be reached answers by its calls as it would without any of this: told once in the log,
and by `statistics` for as long. Knows endpoints and streams; knows neither calls nor prompts.
Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from cache.channel.connection import ChannelConnection
from cache.channel.endpoint import address_of
from cache.channel.frames import CHANNEL_BYTES, ReplyTo
from cache.channel.reader import PieceReader
from cache.delta_frames import DELTAS
from cache.messages import Delta, GenerateRequest, ReplicaInfo
from cache.types import ReplicaId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How patiently connections are made."""

    connect_timeout_s: float = 5.0  # to the replica's welcome
    retry_s: float = 0.2  # failed attempts double it up to this
    max_retry_s: float = 5.0
    told_after_s: float = 2.0  # without one: who is dead has left the membership by then


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """For metrics and tests."""

    open_by_replica: Mapping[ReplicaId, bool]  # of those that offer one
    by_channel: int  # calls whose deltas came over a connection
    by_call: int  # calls whose deltas came as items of Ray's call, because there was no connection
    lost: int  # connections that ended while their replica was there


class DeltaChannels:
    """`update` follows the membership; `open` once a call; `aclose` any number of times."""

    def __init__(self, settings: ChannelSettings | None = None) -> None:
        self._settings = settings or ChannelSettings()
        self._channel = secrets.token_bytes(CHANNEL_BYTES)
        self._numbers = itertools.count()
        self._readers: dict[int, PieceReader[Delta]] = {}
        self._connections: dict[ReplicaId, ChannelConnection[Delta]] = {}
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._leaving: set[ReplicaId] = set()  # gone from the membership, and still connected
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._by_channel = self._by_call = self._lost = 0

    def update(self, replicas: Mapping[ReplicaId, ReplicaInfo]) -> None:
        """Be connected to these replicas and no others. Needs a running event loop; does not block."""
        if self._is_closed:
            return
        wanted = {name: info.delta_endpoint for name, info in replicas.items() if info.delta_endpoint}
        self._leaving -= wanted.keys()
        for replica_id in self._tasks.keys() - wanted.keys() - self._leaving:
            if self._is_open(replica_id):
                self._leaving.add(replica_id)  # it finishes what it has: the connection ends with it
            else:
                self._end(replica_id)
        for replica_id, endpoint in wanted.items():
            if replica_id not in self._tasks:
                self._tasks[replica_id] = asyncio.create_task(
                    self._keep(replica_id, endpoint), name=f"deltas of {replica_id}"
                )

    def open(self, request: GenerateRequest) -> PieceReader[Delta] | None:
        """A stream for one call's deltas, to be closed; None where all have to come by the call.

        Large answers do: logprobs are many times their text.
        """
        sampling = request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return None
        if not any(connection.is_open for connection in self._connections.values()):
            self._by_call += bool(self._tasks)
            return None
        reader: PieceReader[Delta] = PieceReader(ReplyTo(self._channel, next(self._numbers)))
        self._readers[reader.reply_to.stream] = reader
        return reader

    def close(self, reader: PieceReader[Delta]) -> None:
        """Nobody reads it any more: what still comes is dropped. Idempotent."""
        if self._readers.pop(reader.reply_to.stream, None) is None:
            return
        if isinstance(reader.source, ChannelConnection):
            reader.source.forget(reader)
            self._by_channel += 1

    def came_by_call(self) -> None:
        """A replica that this Router is not connected to has answered by the call."""
        self._by_call += 1

    def statistics(self) -> ChannelStatistics:
        """O(replicas)."""
        return ChannelStatistics(
            {name: self._is_open(name) for name in self._tasks.keys() - self._leaving},
            by_channel=self._by_channel,
            by_call=self._by_call,
            lost=self._lost,
        )

    async def aclose(self) -> None:
        """End every connection. Idempotent."""
        self._is_closed = True
        for replica_id in list(self._tasks):
            self._end(replica_id)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _is_open(self, replica_id: ReplicaId) -> bool:
        connection = self._connections.get(replica_id)
        return connection is not None and connection.is_open

    def _end(self, replica_id: ReplicaId) -> None:
        task = self._tasks.pop(replica_id)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.cancel()

    async def _keep(self, replica_id: ReplicaId, endpoint: str) -> None:
        """Connected, and again when that ends, until cancelled, or until a replica that leaves has gone."""
        loop, settings = asyncio.get_running_loop(), self._settings
        retry_s, without_since, is_told = settings.retry_s, loop.time(), False
        while True:
            connection, why = await self._connected(replica_id, endpoint)
            if connection is not None:
                if is_told:
                    logger.info("deltas come over a connection again", extra={"replica_id": replica_id})
                try:
                    await connection.ended
                finally:
                    del self._connections[replica_id]
                    connection.close()
                if replica_id in self._leaving:
                    self._leaving.remove(replica_id)
                    self._end(replica_id)
                    return
                self._lost += 1
                why = str(connection.fault or "it was lost")
                retry_s, without_since, is_told = settings.retry_s, loop.time(), False
            if not is_told and loop.time() - without_since >= settings.told_after_s:
                logger.warning(
                    "no connection for deltas, they come by Ray's calls",
                    extra={"replica_id": replica_id, "detail": why},
                )
                is_told = True
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, settings.max_retry_s)

    async def _connected(
        self, replica_id: ReplicaId, endpoint: str
    ) -> tuple[ChannelConnection[Delta] | None, str]:
        """A connection that the replica has welcomed; or why there is none."""
        connection: ChannelConnection[Delta] | None = None
        try:
            host, port = address_of(endpoint)
            async with asyncio.timeout(self._settings.connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: ChannelConnection(DELTAS, self._channel, self._readers), host, port
                )
                if await connection.opened:
                    self._connections[replica_id] = connection
                    return connection, ""
                return None, str(connection.fault or "it was refused")
        except (OSError, TimeoutError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            if connection is not None and self._connections.get(replica_id) is not connection:
                connection.close()
