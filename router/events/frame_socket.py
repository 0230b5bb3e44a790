"""A subscribing socket whose messages are handed to a callback as they come, on the event loop.

zmq's own asyncio sockets make of each message a future, a task's turn and two failed reads: a Router that
hears twenty a second from every replica used more CPU for that than for what they say
(`docs/design/009-events.md`). Here the loop watches the socket's descriptor, and what has come is read until
nothing is left.
Knows frames and the event loop; knows nothing of what the frames mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from zmq.constants import EVENTS, FD, IPV6, LINGER, NOBLOCK, POLLIN, SUB, SUBSCRIBE
from zmq.sugar.context import Context
from zmq.sugar.socket import Socket

from cache.types import ReplicaId

MESSAGES_PER_TURN = 64  # then the loop gets a turn: a flood of events must not stall requests
PAUSE_S = 0.2  # after a failure: a bug that repeats must not fill the log

logger = logging.getLogger(__name__)


class FrameSocket:
    """Reads from when it is built until `close`. Owner: the event loop it is built on."""

    def __init__(
        self,
        context: Context[Any],
        endpoint: str,
        topics: Sequence[bytes],
        on_frames: Callable[[list[bytes]], None],
        *,
        replica_id: ReplicaId,
        options: Mapping[int, int],
    ) -> None:
        """topics: what messages begin with; others are not sent. replica_id: whose they are, for the log.
        options: of the socket, by zmq's numbers.

        A message that `on_frames` raises for is lost, and logged; those after it are read a moment later.
        Raises ZMQError if the endpoint is not one.
        """
        self._on_frames = on_frames
        self._replica_id = replica_id
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        self._goes_on = False  # a turn is due for what the last one left behind
        self._is_closed = False
        self._socket: Socket[Any] = connected(context, SUB, endpoint, options, socket_class=Socket)
        for topic in topics:
            self._socket.setsockopt(SUBSCRIBE, topic)
        self._descriptor = int(self._socket.getsockopt(FD))
        self._resume()

    def close(self) -> None:
        """Read nothing more, and let go of the socket. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pause()
        self._socket.close(linger=0)

    def _on_readable(self) -> None:
        if not self._goes_on:
            self._read()

    def _read(self) -> None:
        """All that has come, up to a turn's worth.

        The descriptor tells once that something has come: what is left behind has to be asked for.
        """
        self._goes_on = False
        try:
            for _ in range(MESSAGES_PER_TURN):
                if not self._has_more():
                    return
                self._on_frames(self._socket.recv_multipart(NOBLOCK))
        except Exception:
            # A bug or a broken socket must not silence this replica for good.
            logger.exception("event failed", extra={"replica_id": self._replica_id})
            if not self._is_closed:
                self._pause()
                self._resuming = self._loop.call_later(PAUSE_S, self._resume)
        else:
            self._go_on()

    def _has_more(self) -> bool:
        """Asked, not tried: a read that finds nothing raises, and that costs more than to read something."""
        is_reading = not self._is_closed and self._resuming is None
        return is_reading and bool(cast("int", self._socket.getsockopt(EVENTS)) & POLLIN)

    def _go_on(self) -> None:
        self._goes_on = True
        self._loop.call_soon(self._read)

    def _pause(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._resuming is not None:
            self._resuming.cancel()

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._descriptor, self._on_readable)
        self._go_on()  # of what has come in the meantime nothing is told any more


def connected(
    context: Context[Any],
    kind: int,
    endpoint: str,
    options: Mapping[int, int],
    *,
    socket_class: Callable[[Any, int], Any] | None = None,
) -> Any:
    """A connecting socket. A message beyond MAXMSGSIZE ends the connection before it is read into
    memory; ZMQ then connects anew, which shows as a gap.

    socket_class: None = the context's own. Raises ZMQError for a wrong endpoint.
    """
    socket: Any = context.socket(kind, socket_class=socket_class)
    with contextlib.ExitStack() as on_error:
        on_error.callback(socket.close, linger=0)
        socket.setsockopt(LINGER, 0)
        socket.setsockopt(IPV6, int("[" in endpoint))
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.connect(endpoint)
        on_error.pop_all()
    return socket
