"""One stream's pieces as they come in: in order, none missing, none twice, or lost as a whole.

Pieces are numbered; one that is not the next means that its connection cannot be believed. Whoever reads
slowly pauses the source, and gets what came in between in larger ones: no more than a few are kept here.
Knows pieces; knows no sockets. Owner: the event loop of its connection.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol

from cache.channel.frames import Content, Piece, ReplyTo
from cache.errors import WireError

PAUSED_PIECES = 8  # unread: a source that sends more is told to wait


class PieceSource(Protocol):
    """What pieces come from: a connection."""

    def flow(self, stream: int, *, is_paused: bool) -> None:
        """Have the source stop sending, or go on. Does not block."""


class PieceReader(Generic[Content]):
    """Fed by one connection, read by one task."""

    def __init__(self, reply_to: ReplyTo) -> None:
        self.reply_to = reply_to
        self.is_lost = False  # nothing more will come, or nothing that goes on from here
        self.source: PieceSource | None = None  # what its first piece came from
        self._unread: list[Content] = []
        self._next = 0  # number of the piece that is due
        self._is_paused = False
        self._news: asyncio.Future[None] | None = None  # there while somebody waits for news

    @property
    def has_pieces(self) -> bool:
        return bool(self._unread)

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return self.source is not None

    def receive(self, piece: Piece[Content], source: PieceSource) -> None:
        """The next piece. Raises WireError for any other: then `source` has lost or repeated some.

        One from elsewhere ends the stream, and nothing else of that source's: before Serve has heard that a
        call was accepted it makes it anew, and both begin to answer.
        """
        if self.source is None:
            self.source = source
        elif self.source is not source:
            self.lose()
            return
        if piece.number != self._next:
            raise WireError(f"piece {piece.number} of a stream whose next one is {self._next}")
        self._next += 1
        self._unread.append(piece.content)
        if len(self._unread) >= PAUSED_PIECES and not self._is_paused:
            self._is_paused = True
            source.flow(self.reply_to.stream, is_paused=True)
        self.wake()

    def lose(self) -> None:
        """Its source has ended, or is not the only one."""
        self.is_lost = True
        self.wake()

    def take(self) -> Content:
        """The next unread piece's content; there has to be one."""
        content = self._unread.pop(0)
        if self._is_paused and not self._unread:
            self._is_paused = False
            if self.source is not None and not self.is_lost:
                self.source.flow(self.reply_to.stream, is_paused=False)
        return content

    async def news(self) -> None:
        """Returns at the next piece, loss, or `wake`."""
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def wake(self) -> None:
        """End a wait for news."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
