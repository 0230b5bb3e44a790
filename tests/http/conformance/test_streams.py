"""Streams: what comes, in what order, and what it adds up to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from tests.conformance.asking import MESSAGES, cached, chat, complete, raw_post, unique, wait_for
from tests.conformance.rows import row
from tests.fakes.http import RouterUnderTest, events_of
from tests.http_server import MODEL, HttpServer, scripted_server


@row("stream, [DONE], one finish_reason")
@pytest.mark.parametrize("ask", [chat, complete])
def test_streaming_equals_not_streaming(client: openai.OpenAI, ask: Any) -> None:
    whole = ask(client, max_tokens=24).choices[0]
    chunks = list(ask(client, max_tokens=24, stream=True))
    text = "".join(
        (choice.delta.content or "") if ask is chat else choice.text
        for chunk in chunks
        for choice in chunk.choices
    )
    assert text == (whole.message.content if ask is chat else whole.text)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


@row("stream, [DONE], one finish_reason")
def test_nothing_follows_done(server: HttpServer) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert events_of(answer.content)[-1] == "[DONE]"
    assert answer.content.endswith(b"data: [DONE]\n\n")


@row("no chunk before the first token is computed")
def test_no_chunk_comes_before_the_first_token() -> None:
    """Not even the answer's head: a client that times its first chunk times the first token."""
    release: list[asyncio.Event] = []

    async def slow(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        release.append(asyncio.Event())
        await release[-1].wait()
        yield Delta("a", (1,), 0)
        yield Delta("b", (2,), 0, FinishReason.STOP)

    router = RouterUnderTest()
    router.follow(slow)
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    with scripted_server(router) as server, socket.create_connection(("127.0.0.1", server.port), 10) as link:
        link.sendall(raw_post("/v1/chat/completions", json.dumps(body).encode()))
        wait_for(lambda: bool(release))
        link.settimeout(0.3)
        with pytest.raises(TimeoutError):
            link.recv(1)
        server.loop.call_soon_threadsafe(release[0].set)
        link.settimeout(10)
        content = b""
        while b"[DONE]" not in content:
            content += link.recv(65536)
    first = next(line for line in content.split(b"\n") if line.startswith(b"data: "))
    assert json.loads(first[6:])["choices"][0]["delta"] == {"role": "assistant", "content": "a"}


@row("stream_options.include_usage")
@pytest.mark.parametrize("ask", [chat, complete])
def test_usage_comes_in_a_last_chunk_without_choices(client: openai.OpenAI, ask: Any) -> None:
    chunks = list(ask(client, unique(), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert cached(chunks[-1]) == 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


@row("stream_options.continuous_usage_stats")
def test_usage_so_far_comes_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, max_tokens=24, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 24
