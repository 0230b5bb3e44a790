"""Merging generations and watching the client, without HTTP."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator

import pytest

from cache.messages import Delta
from router.openai_api.streams import merge

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


async def _stream(count: int, seen: list[str]) -> AsyncGenerator[Delta, None]:
    try:
        for index in range(count):
            seen.append(VARIABLE.get())
            yield Delta(str(index), (index,), 0)
            await asyncio.sleep(0)
    finally:
        seen.append("closed")


async def test_several_streams_start_each_in_an_empty_context() -> None:
    """Serve ties the calls of one context to one request id, and two of those at once would hang."""
    VARIABLE.set("the request's")
    seen: list[str] = []
    items = [item async for item in merge([_stream(2, seen), _stream(2, seen)])]
    assert sorted((item.index, item.delta.text) for item in items) == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
    assert set(seen) == {"unset", "closed"}


async def test_one_stream_keeps_the_requests_context() -> None:
    """So that Serve cancels it with the request."""
    VARIABLE.set("the request's")
    seen: list[str] = []
    assert [item.index async for item in merge([_stream(2, seen)])] == [0, 0]
    assert set(seen) == {"the request's", "closed"}


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_closing_it_closes_every_stream(num_streams: int) -> None:
    seen: list[str] = []
    merged = merge([_stream(1_000_000, seen) for _ in range(num_streams)])
    await anext(merged)
    await merged.aclose()
    assert seen.count("closed") == num_streams


async def test_a_slow_reader_slows_the_streams() -> None:
    seen: list[str] = []
    merged = merge([_stream(1_000_000, seen) for _ in range(2)])
    await anext(merged)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(seen) < 20
    await merged.aclose()
