"""One replica's delta server behind a relay, whose connections all end at once when told to.

    Router ──> relay, a thread in the replica's process ──> the replica's delta server

How often it was told stands in a file that the test writes. Knows sockets; knows no frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

_POLL_S = 0.01
_CHUNK_BYTES = 1 << 16


def cut_all(folder: Path, number: int) -> None:
    """End every connection of every relay there, for the `number`th time, from 1."""
    new = folder / "cuts.new"
    new.write_text(str(number))
    new.rename(folder / "cuts")


class DeltaRelay(threading.Thread):
    """Lives as long as the process."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        """endpoint: the delta server's own."""
        super().__init__(name="delta relay", daemon=True)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._upstream = host.strip("[]"), int(port)
        self._folder = folder
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_listening = threading.Event()
        self.address = ""

    def start(self) -> None:
        """Returns when it has an address."""
        super().start()
        self._is_listening.wait()

    def run(self) -> None:
        asyncio.run(self._relay())

    async def _relay(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_listening.set()
        cuts = _cuts(self._folder)
        while True:
            await asyncio.sleep(_POLL_S)
            if (now := _cuts(self._folder)) != cuts:
                cuts = now
                for writer in self._writers:
                    writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            self._writers |= {writer, up_writer}
            try:
                await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))
            finally:
                self._writers -= {writer, up_writer}
                up_writer.transport.abort()
        writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end has gone."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    writer.transport.abort()


def _cuts(folder: Path) -> int:
    try:
        return int((folder / "cuts").read_text())
    except FileNotFoundError:
        return 0
