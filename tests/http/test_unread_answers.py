"""A client that asks for a stream and does not read it, over real HTTP: what it had is free again."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator

import pytest
import uvicorn
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.errors import AnswerNotTaken
from router.limits import Limits
from router.openai_api.client_connection import drop_connection
from router.openai_api.streams import SseResponse, event
from tests.fakes.http import MODEL, RouterUnderTest
from tests.http_server import scripted_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def endless(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
    """As much as fits between Router and client, in few pieces."""
    while True:
        yield Delta("x" * 200_000, (1,), 0)


def read_on(connection: socket.socket, answer: bytearray) -> None:
    while content := connection.recv(1 << 20):
        answer += content


def test_a_stream_that_is_not_read_loses_its_place_and_its_connection() -> None:
    router = RouterUnderTest(limits=Limits(max_unread_seconds=1))
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    with (
        scripted_server(router) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as stays,
    ):
        router.follow(endless)
        stays.sendall(HEAD % len(body) + body)
        until = time.monotonic() + 20
        while not router.calls.cancelled and time.monotonic() < until:
            time.sleep(0.05)
        assert (router.calls.running, router.calls.cancelled) == (0, 1)
        answer = bytearray()
        with pytest.raises(ConnectionResetError):
            read_on(stays, answer)
    assert b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("is_served", [False, True], ids=["by uvicorn", "by Serve in it"])
async def test_a_server_need_not_wait_for_who_takes_nothing(is_served: bool) -> None:
    """It closes a connection once all that was sent has been taken: that was never, and a Router that was to
    leave waited for it."""
    loop, ended, received = asyncio.get_running_loop(), asyncio.Event(), list[Receive]()

    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            yield event(b"x" * 20_000)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        events = endless()
        received.append(receive)
        try:
            await SseResponse(await anext(events), events, {}, 0.1)(scope, receive, send)
        except AnswerNotTaken:
            ended.set()
            raise

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        proxy = ASGIDIReceiveProxy(scope, receive, loop)
        fetching = proxy.fetch_until_disconnect_task()
        try:
            await answer(scope, proxy, send)
        finally:
            fetching.cancel()

    config = uvicorn.Config(served if is_served else answer, log_level="critical", lifespan="off")
    config.load()
    state = ServerState()
    ours, clients = socket.socketpair()
    ours.setblocking(False)
    with clients:
        await loop.connect_accepted_socket(lambda: HttpToolsProtocol(config, state, {}, loop), ours)
        clients.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(20):
            await ended.wait()
            while state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0)
        assert ours.fileno() == -1
    drop_connection(received[0])  # one that has gone by itself is let go
