"""What is between a proxy's middlewares and a Router's: Serve's Python proxy and its streaming call, as far
as either of them can tell."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache.channel.server import ChannelServer
from deploy.http_errors import OneErrorShape
from deploy.proxy_bodies import BodiesFromRouters
from router.bodies.body_channel import BodiesByChannel, BodyStatistics
from router.bodies.body_frames import BODIES


class ServeCall:
    """ASGI application of a proxy. A client that goes ends the call; an application that fails ends the
    answer, where it has begun, without a word."""

    def __init__(self, router: ASGIApp) -> None:
        self._router = router
        self.scopes: list[Scope] = []  # as they came to the Router
        self.turns_late = 0  # of the event loop, until the proxy has what a Router sends by the call
        self.failure_status = 500  # what Serve makes of a Router's failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        fetched: asyncio.Queue[Message] = asyncio.Queue()

        async def fetch() -> Message:
            return await fetched.get()

        async def answer() -> None:
            try:
                self.scopes.append(pickle.loads(pickle.dumps(scope)))
                await self._router(dict(self.scopes[-1]), fetch, sent.put)
            finally:
                sent.put_nowait(None)

        async def listen() -> None:
            while True:
                message = await receive()
                fetched.put_nowait(message)
                if message["type"] == "http.disconnect":
                    return

        call, client = asyncio.create_task(answer()), asyncio.create_task(listen())
        client.add_done_callback(lambda _: call.cancel())
        has_begun = False
        try:
            while (message := await sent.get()) is not None:
                for _ in range(self.turns_late):
                    await asyncio.sleep(0)
                has_begun = True
                await send(message)
            await asyncio.wait({call})
            if not call.cancelled() and call.exception() is not None and not has_begun:
                await self._say_failure(send)
        finally:
            for task in (call, client):
                task.cancel()
            await asyncio.gather(call, client, return_exceptions=True)

    async def _say_failure(self, send: Send) -> None:
        if self.failure_status in (408, 429, 503):
            await send({"type": "http.response.start", "status": self.failure_status, "headers": []})
            await send({"type": "http.response.body", "body": b"Serve's words", "more_body": False})


class ProxyAndRouter:
    """Both ends' middlewares around an application, as they are in a cluster."""

    def __init__(self, app: ASGIApp, *, has_channel: bool = True) -> None:
        self.statistics = BodyStatistics()
        self.whole: list[Receive] = []  # of requests whose body came with them, and need not be fetched
        self.server: ChannelServer[bytes] | None = None
        router = app
        if has_channel:
            self.server = ChannelServer(BODIES, "127.0.0.1")
            self.server.start()
            router = BodiesByChannel(app, self.server, self.statistics, self._note_whole)
        self.call = ServeCall(router)
        self.bodies = BodiesFromRouters(self.call)
        self.app: ASGIApp = OneErrorShape(self.bodies)

    def _note_whole(self, receive: Receive, _lost: asyncio.Future[None]) -> None:
        self.whole.append(receive)

    def cut(self) -> None:
        """The network loses the connection."""
        assert self.server is not None
        for connection in list(self.server._connections):
            connection._transport.abort()

    def lag(self, seconds: float) -> None:
        """What goes by the channel takes so long."""
        assert self.server is not None
        for connection in self.server._connections:
            _delay(connection, seconds)

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        tasks = list(self.bodies._routers._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _delay(connection: object, seconds: float) -> None:
    loop, write = asyncio.get_running_loop(), connection._transport.write  # type: ignore[attr-defined]

    class Late:
        def __getattr__(self, name: str) -> Callable[..., object]:
            transport_attribute: Callable[..., object] = getattr(transport, name)
            return transport_attribute

        def write(self, data: bytes) -> None:
            loop.call_later(seconds, write, data)

    transport = connection._transport  # type: ignore[attr-defined]
    connection._transport = Late()  # type: ignore[attr-defined]
