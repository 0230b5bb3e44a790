"""A client that asks for a stream and does not read it, over real HTTP: what it had is free again."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncGenerator

from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.limits import Limits
from tests.fakes.http import MODEL, RouterUnderTest
from tests.http_server import scripted_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def endless(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
    """As much as fits between Router and client, in few pieces."""
    while True:
        yield Delta("x" * 200_000, (1,), 0)


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
        while content := stays.recv(1 << 20):  # to the end: the server closes the connection
            answer += content
    assert b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")
