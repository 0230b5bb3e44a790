"""Bodies as they come to Serve's Python proxy from Routers: over a connection to each, not item by item.

The other end is `router/bodies/body_channel.py`. A proxy that is connected (`router_connections.py`) names
itself with every request to a Router. Serve's call carries the request, the answer's last part, or its
failure, as before. Knows ASGI and streams of bytes; knows nothing of Serve. Owner: the proxy's event loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache.channel.reader import PieceReader
from cache.errors import PiecesLost, WireError
from deploy.router_connections import RouterConnections
from router.bodies.body_frames import (
    BODIES_AT_HEADER,
    BODY_HEADER,
    BY_CHANNEL,
    DROPPED,
    END,
    NO_CHANNEL,
    REPLY_TO_HEADER,
    REQUEST_BODY_KEY,
    read_start,
    reply_to_text,
)
from router.bodies.request_body import with_beginning, with_body
from router.openai_api.client_connection import drop_connection

# The end of a call and the pieces before it take two connections: they may be so far apart.
LATE_PIECE_LIMIT_S = 5.0
MAX_PATHS = 64
MAX_BODY_BYTES = 1 << 20  # of a request whose body goes with the call; larger ones are fetched by it
# For such a body to come. One that takes longer is fetched, too: the Router knows how long a client may take.
BODY_WAIT_S = 1.0
_OUTLIVES_CLIENT = b"x-request-disconnect-disabled"  # Serve's: it then cancels nothing
_OURS = (BODY_HEADER, BODIES_AT_HEADER)


class BodiesFromRouters:
    """ASGI middleware around Serve's proxy; one for each proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._routers = RouterConnections()
        # Answered by Routers, the latest last: other applications may be behind this proxy, too.
        self._paths: dict[str, None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, client = scope["path"], receive
        # Named to Routers alone, and where the answer can be taken: who knows the name could take its place.
        takes_channel = self._routers.is_connected and path in self._paths
        if takes_channel and _comes_along(scope):
            content, progress = await _read(receive)
            if progress is _Progress.GONE:
                return  # nobody is left to answer
            if progress is _Progress.WHOLE:
                scope[REQUEST_BODY_KEY] = content
                receive = with_body(content, receive)  # for an application that has come to this path since
            else:
                receive = with_beginning(content, receive)
        reader = self._routers.open()
        answer = _Answer(reader, receive, send, self._routers.learn, takes_channel=takes_channel)
        name = reply_to_text(reader.reply_to) if takes_channel else NO_CHANNEL
        # In place: Serve puts the request's id there, and who is around this one looks for it.
        scope["headers"] = [header for header in scope["headers"] if header[0] != REPLY_TO_HEADER]
        scope["headers"].append((REPLY_TO_HEADER, name))
        try:
            await self._app(scope, answer.receive, answer.send)
            await answer.finish()
        finally:
            answer.close()
            if answer.is_dropped:
                drop_connection(client)
            self._routers.close(reader)
            self._learn(path, is_routers=answer.is_routers)

    def _learn(self, path: str, *, is_routers: bool | None) -> None:
        if is_routers is not None:
            self._paths.pop(path, None)
        if is_routers:
            self._paths[path] = None
            if len(self._paths) > MAX_PATHS:
                del self._paths[next(iter(self._paths))]


class _Answer:
    """One answer on its way to the client, from whichever of the two it comes."""

    def __init__(
        self,
        reader: PieceReader[bytes],
        receive: Receive,
        send: Send,
        learn: Callable[[str], None],
        *,
        takes_channel: bool,
    ) -> None:
        self._reader = reader
        self._receive = receive
        self._send = send
        self._learn = learn
        self._pump = asyncio.create_task(self._pass_on(), name="answer by channel") if takes_channel else None
        self._has_begun = False  # by the channel
        self._is_idle = False  # the pump waits for a piece, not for the client
        self._is_gone = False  # the client is
        self._fault: PiecesLost | WireError | None = None
        self._is_cut = False  # nothing more goes to the client
        self.is_dropped = False  # for want of a reader: nothing of it need reach the client any more
        self.is_routers: bool | None = None  # whether a Router gave it; None: not begun, or an error of one

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_gone = self._is_gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """What comes by the call; the last part waits until all before it have gone."""
        if message["type"] == "http.response.start":
            told = {name: value for name, value in message.get("headers", ()) if name in _OURS}
            if message["status"] < 400 or BODY_HEADER not in told:
                self.is_routers = BODY_HEADER in told
            if (endpoint := told.get(BODIES_AT_HEADER)) is not None:
                self._learn(endpoint.decode("latin-1"))
            if told.get(BODY_HEADER) == DROPPED:
                self._fault, self.is_dropped = PiecesLost(), True
                return
            if told.get(BODY_HEADER) == BY_CHANNEL:
                try:
                    await self._all_before()
                except (PiecesLost, WireError) as error:  # not to Serve, which would not end the request
                    self._fault, self._is_cut = error, True
                return
            if not self._has_begun:
                self.close()
                headers = [header for header in message.get("headers", ()) if header[0] not in _OURS]
                await self._send({**message, "headers": headers})
            self._is_cut = self._has_begun  # Serve's own words on what failed: too late for them
        elif not self._is_cut:
            await self._send(message)

    async def finish(self) -> None:
        """The call has ended. If that was before the answer's last part, the client gets what there is."""
        if self._fault is None and self._has_begun and not self._is_gone:
            await self._all_before()
        if self._fault is not None and (self._has_begun or self.is_dropped):
            raise self._fault  # before that it is for `OneErrorShape` to say

    def close(self) -> None:
        """Nothing more of it goes to the client by the channel."""
        if self._pump is not None:
            self._pump.cancel()

    async def _pass_on(self) -> None:
        """Returns at the stream's end. Raises PiecesLost, WireError."""
        if (content := await self._next()) == END:
            return
        start = read_start(content)
        self._has_begun = True
        await self._send(start)
        while (content := await self._next()) != END:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def _next(self) -> bytes:
        reader = self._reader
        while not reader.has_pieces:
            if reader.is_lost:
                raise PiecesLost
            self._is_idle = True
            await reader.news()
            self._is_idle = False
        return reader.take()

    async def _all_before(self) -> None:
        """Raises PiecesLost unless all come within the limit, however long the client takes for them."""
        pump = self._pump
        if pump is None:  # it named no channel
            raise PiecesLost
        while not pump.done():
            await asyncio.wait({pump}, timeout=LATE_PIECE_LIMIT_S)
            if not pump.done() and self._is_idle and not self._reader.has_pieces:
                raise PiecesLost
        await pump


def _comes_along(scope: Scope) -> bool:
    """Whether a request's body can come with it: it is known to be small, and the client's end ends the call.
    Else Serve has to fetch both."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    is_small = length.isdigit() and len(length) < 10 and int(length) <= MAX_BODY_BYTES
    return is_small and _OUTLIVES_CLIENT not in headers


class _Progress(enum.Enum):
    """Of a client with its body."""

    WHOLE = enum.auto()
    UNDER_WAY = enum.auto()
    GONE = enum.auto()


async def _read(receive: Receive) -> tuple[bytes, _Progress]:
    """What comes of a request's body within `BODY_WAIT_S`."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            while (message := await receive())["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts), _Progress.WHOLE
    except TimeoutError:
        return b"".join(parts), _Progress.UNDER_WAY
    return b"", _Progress.GONE
