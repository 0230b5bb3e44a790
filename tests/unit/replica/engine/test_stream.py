"""A stream's consumer reads everything, in order, however late it comes."""

from __future__ import annotations

import asyncio

import pytest

from cache.messages import Delta, FinishReason
from replica.engine.stream import DeltaStream, deliver, merge
from replica.errors import ForwardFailed


def stream() -> DeltaStream:
    return DeltaStream(asyncio.get_running_loop())


async def test_a_slow_consumer_gets_the_backlog_in_one_piece() -> None:
    pipe = stream()
    deliver([(pipe, Delta("a", (1,), 4)), (pipe, Delta("", (2, 3), 4)), (pipe, Delta("b", (4,), 4))])
    assert await pipe.next() == Delta("ab", (1, 2, 3, 4), 4)
    pipe.receive(Delta("c", (5,), 4, FinishReason.STOP))
    assert await pipe.next() == Delta("c", (5,), 4, FinishReason.STOP)
    assert pipe.is_over


async def test_the_error_comes_after_what_came_before_it() -> None:
    pipe = stream()
    pipe.receive(Delta("a", (1,), 0))
    pipe.receive(ForwardFailed("reason"))
    assert pipe.is_over
    assert (await pipe.next()).text == "a"
    with pytest.raises(ForwardFailed):
        await pipe.next()


async def test_waits_for_something_to_arrive() -> None:
    pipe = stream()
    waiting = asyncio.create_task(pipe.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    pipe.receive(Delta("a", (1,), 0))
    assert (await waiting).text == "a"
    assert not pipe.is_over


def test_merge_keeps_the_last_word() -> None:
    merged = merge([Delta("a", (1,), 8), Delta("b", (), 8, FinishReason.LENGTH)])
    assert merged == Delta("ab", (1,), 8, FinishReason.LENGTH)
