"""Several generations as one stream, and that stream as server-sent events.

Knows deltas and bytes; knows neither fields nor status codes. Each generation of a merged stream is
pulled by a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cache.errors import ServingError
from cache.messages import Delta
from router.errors import AnswerNotTaken
from router.openai_api.client_connection import drop_connection

DONE = b"data: [DONE]\n\n"
_QUEUED_PER_GENERATION = 4  # deltas: a slow client then slows the pulling, not the memory


class BrokenStream(ServingError):
    """A stream failed after its answer had begun. Raised out of the ASGI application on purpose: the
    server then cuts the connection, and a client cannot take what it has for a whole answer."""


class ClientGone(ServingError):
    """The client closed its connection before the answer was complete."""


# What else ends a line for Python's `splitlines`, and so for clients that read lines with httpx; of control
# characters below a space JSON allows none.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def event(content: bytes) -> bytes:
    """One server-sent event. `content` is JSON of ours; it comes out as one line, whoever reads it."""
    if not content.isascii():
        text = content.decode()
        if "\x85" in text or "\u2028" in text or "\u2029" in text:
            content = text.translate(_LINE_ENDS).encode()
    return b"data: " + content + b"\n\n"


@dataclass(frozen=True, slots=True)
class Indexed:
    """A delta and which of the request's choices it continues."""

    index: int
    delta: Delta


async def merge(
    streams: Sequence[AsyncGenerator[Delta, None]], answers_each: int = 1
) -> AsyncGenerator[Indexed, None]:
    """Deltas of all streams as they come; ends when all have, raises what the first failing one raises.

    answers_each: that each stream carries; a prompt's choices are numbered after those of the prompts before.
    Closing it ends every stream. One stream alone is passed through, in the caller's own task.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for delta in only:
                yield Indexed(delta.choice, delta)
        return
    queue: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue(
        _QUEUED_PER_GENERATION * len(streams)
    )
    # An empty context per task: Serve ties all handle calls of one context to one request id, and two of
    # them waiting for a replica at once would then never be told apart (both hang). It also means that
    # Serve cannot cancel them with the request: the `finally` here does.
    tasks = [
        contextvars.Context().run(asyncio.create_task, _pump(index * answers_each, stream, queue))
        for index, stream in enumerate(streams)
    ]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await cancel_and_wait(tasks)


async def _pump(
    first_index: int,
    stream: AsyncGenerator[Delta, None],
    queue: asyncio.Queue[Indexed | BaseException | None],
) -> None:
    """Moves one stream into the queue, its end or its error last. first_index: of its choices."""
    try:
        async with contextlib.aclosing(stream):
            async for delta in stream:
                await queue.put(Indexed(first_index + delta.choice, delta))
    except asyncio.CancelledError as error:
        # By `merge`, which reads no more, or by what the stream waited for, which has been closed.
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(error)
        raise
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def cancel_and_wait(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancels what still runs and waits until its `finally` blocks are through. Raises nothing of theirs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Result = TypeVar("Result")


async def unless_gone(request: Request, answer: Awaitable[Result]) -> Result:
    """`answer`'s result, or ClientGone as soon as the client is; `answer` is cancelled then.

    Call after the body was read: what the server receives next can only be the disconnect.
    """
    work = asyncio.ensure_future(answer)
    watcher = asyncio.create_task(_until_disconnect(request.receive))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone("the client went away before its answer")
        return work.result()
    finally:
        await cancel_and_wait([work, watcher])


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class SseResponse(Response):
    """Sends events until they end, fail, the client goes or takes nothing any more; whichever it is, closes
    their source.

    Starlette's StreamingResponse leaves the source to the garbage collector when sending is what was
    interrupted; a generation would go on until then.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str], max_unread_s: float
    ) -> None:
        """first: already taken from the source, so that the source has begun and will be closed.

        max_unread_s: for which what has been sent last may wait for the client.
        """
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]  # unknown
        self._first = first
        self._rest = rest
        self._max_unread_s = max_unread_s
        self._unread_since: float | None = None  # the loop's time; None: all that was sent has been taken
        self._is_whole = False  # the last event was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(receive, send)
        except AnswerNotTaken:
            drop_connection(receive)  # last: a server cancels the requests of one that has gone
            raise

    async def _answer(self, receive: Receive, send: Send) -> None:
        """Raises what cuts the connection."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(_until_disconnect(receive))
        try:
            await self._until_one_ends({sender, watcher})
            if sender.done() or self._is_whole:
                await sender
        except AnswerNotTaken as error:
            await cancel_and_wait([sender])
            await self._rest.athrow(error)  # it hears why it ends: its last word nobody would read
            raise
        finally:
            try:
                await cancel_and_wait([sender, watcher])
            finally:  # a server may cancel it while it waits for those
                await self._rest.aclose()

    async def _until_one_ends(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Raises AnswerNotTaken. One timer for all that is sent: most answers end before it does."""
        clock, left_s = asyncio.get_running_loop().time, self._max_unread_s
        while left_s > 0.0:
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            now = clock()
            since = now if self._unread_since is None else self._unread_since
            left_s = since + self._max_unread_s - now
        raise AnswerNotTaken(self._max_unread_s)

    async def _send(self, send: Send) -> None:
        await self._send_in_time(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}, send
        )
        await self._send_piece(self._first, send)
        async for content in self._rest:
            await self._send_piece(content, send)
        if not self._is_whole:
            await self._send_in_time({"type": "http.response.body", "body": b"", "more_body": False}, send)

    async def _send_piece(self, content: bytes, send: Send) -> None:
        """The last piece ends the body too: one write to the connection instead of two.

        What the server receives from then on is a disconnect, which is none.
        """
        self._is_whole = content.endswith(DONE)
        await self._send_in_time(
            {"type": "http.response.body", "body": content, "more_body": not self._is_whole}, send
        )

    async def _send_in_time(self, message: Message, send: Send) -> None:
        """Returns when the server has room for more."""
        self._unread_since = asyncio.get_running_loop().time()
        await send(message)
        self._unread_since = None
