"""A stream's consumer reads everything, in order, however late it comes; up to a limit."""

from __future__ import annotations

import asyncio

import pytest

from cache.errors import LeftUnread
from cache.messages import Delta, FinishReason
from replica.engine import stream as streams
from replica.engine.backlog import MAX_DELTA_BYTES
from replica.engine.stream import DeltaStream, deliver
from replica.errors import ForwardFailed

HALF = Delta("x" * (MAX_DELTA_BYTES // 2), (), 0)


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


async def test_answers_take_turns_each_in_its_order() -> None:
    pipe = DeltaStream(asyncio.get_running_loop(), 2)
    deliver([(pipe, Delta("a", (1,), 0)), (pipe, Delta("x", (7,), 0, choice=1)), (pipe, Delta("b", (2,), 0))])
    assert (await pipe.next()).text == "ab"
    pipe.receive(Delta("c", (3,), 0, FinishReason.STOP))
    pipe.receive(Delta("y", (8,), 0, FinishReason.STOP, choice=1))
    assert pipe.is_over
    assert (await pipe.next()).text == "xy"
    assert not pipe.is_read
    assert (await pipe.next()).text == "c"
    assert pipe.is_read


async def test_a_large_backlog_comes_in_pieces_and_in_order() -> None:
    """The Router makes JSON of each at once."""
    pipe = stream()
    deliver([(pipe, HALF)] * 5 + [(pipe, Delta("y", (1,), 0, FinishReason.STOP))])
    texts = [(await pipe.next()).text for _ in range(3)]
    assert texts == [2 * HALF.text, 2 * HALF.text, HALF.text + "y"]
    assert pipe.is_read


async def test_what_was_read_is_no_part_of_what_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", MAX_DELTA_BYTES)
    pipe = stream()
    for _ in range(5):
        deliver([(pipe, HALF), (pipe, HALF)])
        assert (await pipe.next()).text == 2 * HALF.text
    assert not pipe.is_over


async def test_it_ends_where_too_much_lies_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that did not read had its answer kept for it without a limit, 3 GB of one request."""
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", 2 * MAX_DELTA_BYTES)
    left: list[DeltaStream] = []
    pipe = DeltaStream(asyncio.get_running_loop(), 2, on_left=left.append)
    deliver([(pipe, HALF), (pipe, HALF), (pipe, Delta(HALF.text, (), 0, choice=1)), (pipe, HALF)])
    assert not left
    pipe.receive(Delta("x", (), 0, choice=1))
    assert left == [pipe]
    deliver([(pipe, HALF), (pipe, ForwardFailed("reason"))])  # under way before the engine knew
    assert pipe.is_over
    with pytest.raises(LeftUnread) as error:
        await pipe.next()
    assert error.value.unread_bytes == 2 * MAX_DELTA_BYTES + 1
    assert left == [pipe]


async def test_an_answer_that_is_whole_is_kept_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", 4)
    pipe = stream()
    pipe.receive(Delta("whole", (1,), 0, FinishReason.STOP))
    assert (await pipe.next()).text == "whole"
