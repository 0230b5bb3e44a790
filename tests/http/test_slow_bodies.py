"""A client that stops in the middle of its bodies, over real HTTP: it is told so, and its room is free."""

from __future__ import annotations

import json
import socket

import httpx

from router.limits import Limits
from tests.fakes.http import MODEL, RouterUnderTest
from tests.http_server import scripted_server

NUM_BYTES = 200_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


def test_a_body_that_stops_loses_its_room_and_its_connection() -> None:
    limits = Limits(max_body_bytes=NUM_BYTES, max_bodies_bytes=NUM_BYTES + 10_000, max_body_pause_seconds=1)
    body = {"model": MODEL, "prompt": "x" * (NUM_BYTES - 1000), "max_tokens": 1}
    router = RouterUnderTest(limits=limits, max_model_len=2 * NUM_BYTES)
    with (
        scripted_server(router) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as stops,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        stops.sendall(HEAD % NUM_BYTES + b" " * (NUM_BYTES - 1))
        answer = b""
        while content := stops.recv(65536):  # to the end: the server closes the connection
            answer += content
        head, _, said = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        assert json.loads(said)["error"]["code"] == "body_too_slow"
        assert client.post("/v1/completions", json=body).status_code == 200
