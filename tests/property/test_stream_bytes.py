"""A stream as bytes on a connection: whatever TCP does to it, it is the same events and ends once.

Requests and answers pass a relay that cuts them anywhere, between the bytes of one character or of one line
end too. What comes back is read as HTTP chunks and as server-sent events, strictly.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from tests.fakes.http import MODEL, RouterUnderTest, events_of
from tests.http_server import HttpServer, scripted_server

# What could be taken for the end of an event, of a line, of the stream; and characters of 1 to 4 bytes.
AWKWARD = [
    "\n\n",
    "\r\n",
    "\r",
    "data: [DONE]\n\n",
    "\u2028",
    "\u0085",
    "ü",
    "€",
    "🌊",
    ": ping\n\n",
    "",
    '"\\',
]
answers = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=5), min_size=1, max_size=6)


class Answers:
    """The scripts' source: what each prompt of the next request is answered."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    async def script(self, request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        texts = self.texts[request.token_ids[0] - ord("0")]
        for index, text in enumerate(texts):
            yield Delta(text, (index,), 0, FinishReason.STOP if index + 1 == len(texts) else None)


@pytest.fixture(scope="module")
def answered() -> Answers:
    return Answers()


@pytest.fixture(scope="module")
def server(answered: Answers) -> Iterator[HttpServer]:
    router = RouterUnderTest()
    router.follow(answered.script)
    with scripted_server(router) as running:
        yield running


def cut(content: bytes, rng: random.Random, largest: int) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        size = rng.randint(1, largest)
        yield content[at : at + size]
        at += size


class Relay:
    """Passes every byte between a client and a server on, a few at a time."""

    def __init__(self, port: int, rng: random.Random, largest: int) -> None:
        self._upstream = port
        self._rng = rng
        self._largest = largest
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                threading.Thread(target=self._join, args=(client, server), daemon=True).start()

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = threading.Thread(target=self._pump, args=(client, server), daemon=True)
            asked.start()
            self._pump(server, client)
            asked.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                for piece in cut(content, self._rng, self._largest):
                    target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


def exchange(port: int, request: Iterable[bytes]) -> bytes:
    """Everything the server sends on one connection that is closed after one answer."""
    with socket.create_connection(("127.0.0.1", port), 10) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in request:
            link.sendall(piece)
        received = b""
        while content := link.recv(65536):
            received += content
        return received


def a_request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body, ensure_ascii=False).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def unchunked(answer: bytes) -> bytes:
    """The body of a chunked answer; fails on anything that is not exactly one, to its last byte."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while True:
        size_line, _, rest = rest.partition(b"\r\n")
        size = int(size_line, 16)
        assert rest[size : size + 2] == b"\r\n"
        if size == 0:
            assert rest == b"\r\n"  # nothing after the end
            return body
        body += rest[:size]
        rest = rest[size + 2 :]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(answers, min_size=1, max_size=4), is_chat=st.booleans(), seed=st.integers(0, 2**32))
def test_a_stream_is_the_same_events_however_it_is_cut(
    server: HttpServer, answered: Answers, texts: list[list[str]], is_chat: bool, seed: int
) -> None:
    rng = random.Random(seed)
    texts = texts[:1] if is_chat else texts
    answered.texts = texts if not is_chat else [[], *[texts[0]] * 127]  # a chat's prompt begins with a role
    options = {"model": MODEL, "stream": True, "max_tokens": 50, "stream_options": {"include_usage": True}}
    if is_chat:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "ü🌊"}], **options}
    else:
        path, body = "/v1/completions", {"prompt": [f"{index}ü🌊" for index in range(len(texts))], **options}
    received = exchange(server.port, cut(a_request(path, body), rng, largest=40))
    content = unchunked(received)

    *chunks, done = events_of(content)
    assert done == "[DONE]"
    *parsed, usage = [json.loads(chunk) for chunk in chunks]
    assert usage["choices"] == []
    for index, expected in enumerate(texts):
        mine = [choice for chunk in parsed for choice in chunk["choices"] if choice["index"] == index]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + ["stop"]
        found = [choice["delta"].get("content", "") if is_chat else choice["text"] for choice in mine]
        assert "".join(found) == "".join(expected)

    pieces = cut(content, rng, largest=rng.choice([1, 3, 50]))
    decoded = [item.data for item in SSEDecoder().iter_bytes(iter(pieces))]
    assert decoded == [*chunks, "[DONE]"]


@pytest.mark.parametrize("largest", [1, 2, 7, 100])
def test_a_client_behind_a_relay_that_cuts_everything_sees_the_same(
    server: HttpServer, answered: Answers, largest: int
) -> None:
    texts = ["ü", "€", "🌊", "\n\n", "data: [DONE]\n\n", "x" * 50]
    answered.texts = [texts] * 3
    with Relay(server.port, random.Random(largest), largest) as relay:
        for port in (server.port, relay.port):
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
                chunks = list(client.completions.create(model=MODEL, prompt=["0ü", "1", "2"], stream=True))
            for index in range(3):
                mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
                assert "".join(choice.text for choice in mine) == "".join(texts)
                assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]


def test_two_requests_on_one_connection_do_not_mix(server: HttpServer, answered: Answers) -> None:
    """The second one is sent before the first is answered, as HTTP/1.1 allows."""
    answered.texts = [["first"], ["second"]]
    requests = [
        a_request("/v1/completions", {"model": MODEL, "prompt": f"{index}", "stream": True})
        for index in (0, 1)
    ]
    both = requests[0].replace(b"connection: close\r\n", b"") + requests[1]
    received = exchange(server.port, [both])
    assert received.count(b"data: [DONE]") == 2
    first, _, second = received.partition(b"data: [DONE]")
    assert b"first" in first
    assert b"second" not in first
    assert b"second" in second


def test_a_stream_that_fails_has_no_end() -> None:
    """An error event, then a cut connection: neither [DONE] nor the last HTTP chunk."""

    async def script(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        yield Delta("a", (1,), 0)
        raise ValueError("secret")

    router = RouterUnderTest()
    router.follow(script)
    body = {"model": MODEL, "prompt": "x", "stream": True}
    with scripted_server(router) as failing:
        received = exchange(failing.port, [a_request("/v1/completions", body)])
        with openai.OpenAI(base_url=f"{failing.url}/v1", api_key="none") as client:
            stream = client.completions.create(model=MODEL, prompt="x", stream=True)
            with pytest.raises(openai.APIError):
                list(stream)
    assert b'"code": "internal_error"' in received
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")
    assert b"secret" not in received
