"""One call and its delta channel, put together: deltas in order, whichever of the two they take.

    call    accepted ───────────────────────────── end, error, or items of its own
    channel          piece 0, piece 1, ... the last

A replica that has no connection to this Router yields its deltas as the call's items. Otherwise the call only
ends: the error it ends with is the stream's, and an end without the last piece means that some are under way.
Knows calls as async iterators; knows nothing of Ray. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from cache.channel.reader import PieceReader
from cache.errors import PiecesLost
from cache.messages import Delta

# A call's end and the pieces before it take two connections: they may be so far apart.
LATE_PIECE_LIMIT_S = 5.0
# A replica whose connection has ended says so by the call, or is dead, which the call says too.
LAST_WORDS_LIMIT_S = 2.0

_STILL_OPEN: set[asyncio.Task[Delta]] = set()  # calls whose last delta is here: they end by themselves


async def deltas_of(
    call: AsyncIterator[Delta], reader: PieceReader[Delta], on_item: Callable[[], None]
) -> AsyncGenerator[Delta, None]:
    """Everything the call's replica has to say; the caller knows which delta is the last one, and stops.

    on_item: called if deltas come by the call. Raises PiecesLost, and whatever the call raises.
    """
    first = asyncio.ensure_future(_next(call))
    first.add_done_callback(lambda _: reader.wake())
    try:
        while not first.done() or reader.has_pieces:
            if reader.has_pieces:
                yield reader.take()
            elif reader.is_lost:
                await asyncio.wait({first}, timeout=LAST_WORDS_LIMIT_S)
                if not first.done():
                    raise PiecesLost
            else:
                await reader.news()
        try:
            item = first.result()
        except StopAsyncIteration:
            async for delta in _late(reader):
                yield delta
            return
        if reader.has_begun:  # Serve has made the call anew, at another replica: it begins at the beginning
            raise PiecesLost
        on_item()
        yield item
        async for item in call:
            yield item
    finally:
        _let_end(first)


async def _late(reader: PieceReader[Delta]) -> AsyncGenerator[Delta, None]:
    """The call has ended well: its last pieces."""
    while True:
        if reader.has_pieces:
            yield reader.take()
            continue
        if reader.is_lost:
            raise PiecesLost
        try:
            async with asyncio.timeout(LATE_PIECE_LIMIT_S):
                await reader.news()
        except TimeoutError:
            raise PiecesLost from None


async def _next(call: AsyncIterator[Delta]) -> Delta:
    return await anext(call)


def _let_end(first: asyncio.Task[Delta]) -> None:
    """Its outcome is of no interest any more; whoever cancels the call ends it at once."""
    _STILL_OPEN.add(first)
    first.add_done_callback(_forget)


def _forget(first: asyncio.Task[Delta]) -> None:
    _STILL_OPEN.discard(first)
    if not first.cancelled():
        first.exception()  # so that nobody complains that it was never asked for
