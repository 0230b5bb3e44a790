"""One request's way back from the engine thread to the coroutine that waits for it.

The engine thread never waits for a consumer: it hands over to the event loop, where what a slow one has
not read yet piles up, in few pieces and up to a limit. Knows deltas and event loops; knows no engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cache.errors import LeftUnread, ServingError
from cache.messages import Delta
from replica.engine.backlog import Backlog, size_bytes

# Of one request, all its answers together: 7 million tokens of plain text, 380,000 with twenty log
# probabilities each, some 700 MB as JSON. Who is so far behind does not read, and what it left would be kept,
# and its answers computed, for as long as it stays.
MAX_UNREAD_BYTES = 64 << 20


class DeltaStream:
    """Event-loop thread only, but for `loop`, which the engine thread reads to hand over."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_answers: int = 1,
        *,
        on_left: Callable[[DeltaStream], None] = lambda _: None,
    ) -> None:
        """num_answers: it ends when so many have ended, or with an error.

        on_left: told when it ends because too much of it lies unread.
        """
        self.loop = loop
        self._num_left = num_answers
        self._on_left = on_left
        self._unread: deque[Backlog] = deque()
        self._growing: dict[int, Backlog] = {}  # the last one of each answer that has some, unless it is full
        self._unread_bytes = 0
        self._error: ServingError | None = None
        self._arrived = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the last word has been said; nothing is left to cancel then."""
        return self._error is not None or not self._num_left

    @property
    def is_read(self) -> bool:
        """Whether every answer has been read to its end."""
        return not self._num_left and not self._unread

    def receive(self, item: Delta | ServingError) -> None:
        """Called on the loop with what the engine thread handed over."""
        if self._error is not None:
            return  # it was left, and the engine had not heard of it yet
        if isinstance(item, ServingError):
            self._error = item
        else:
            self._keep(item)
            self._num_left -= item.finish_reason is not None
            if self._unread_bytes > MAX_UNREAD_BYTES and self._num_left:
                self._leave()
        self._arrived.set()

    async def next(self) -> Delta:
        """All that has arrived since the last call, as one delta; waits for something. A lot in several.

        Of several answers, what has arrived of one: the one whose turn is longest due.
        Raises the error the request ended with, after what came before it; LeftUnread at once.
        """
        await self._arrived.wait()
        if self._unread:
            backlog = self._unread.popleft()
            self._unread_bytes -= backlog.num_bytes
            if self._growing.get(backlog.choice) is backlog:
                del self._growing[backlog.choice]
            if not self._unread and not self.is_over:
                self._arrived.clear()
            return backlog.delta()
        assert self._error is not None, "read past the end of a stream"
        raise self._error

    def _keep(self, delta: Delta) -> None:
        backlog = self._growing.get(delta.choice)
        if backlog is None:
            backlog = self._growing[delta.choice] = Backlog(delta)
            self._unread.append(backlog)
        else:
            backlog.add(delta)
        if backlog.is_full:
            del self._growing[delta.choice]
        self._unread_bytes += size_bytes(delta)

    def _leave(self) -> None:
        """Give up what lies here, too: whoever does not read need not keep it for long."""
        self._error = LeftUnread(self._unread_bytes, MAX_UNREAD_BYTES)
        self._unread.clear()
        self._growing.clear()
        self._unread_bytes = 0
        self._on_left(self)


Parcel = list[tuple[DeltaStream, Delta | ServingError]]


def deliver(parcel: Parcel) -> None:
    """Hand everything in a parcel to its stream. On the loop that all of them belong to."""
    for stream, item in parcel:
        stream.receive(item)
