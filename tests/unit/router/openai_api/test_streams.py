"""Merging generations and watching the client, without HTTP."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from cache.messages import Delta, FinishReason
from router.errors import AnswerNotTaken
from router.openai_api.streams import DONE, Indexed, SseResponse, event, merge
from tests.fakes.http import RouterUnderTest

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


async def _stream(count: int, seen: list[str]) -> AsyncGenerator[Delta, None]:
    try:
        for index in range(count):
            seen.append(VARIABLE.get())
            yield Delta(str(index), (index,), 0)
            await asyncio.sleep(0)
    finally:
        seen.append("closed")


async def _read(merged: AsyncGenerator[Indexed, None]) -> None:
    async with asyncio.timeout(5.0):
        async for _ in merged:
            pass


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


@pytest.mark.parametrize("is_read", [True, False])
async def test_what_is_cancelled_under_one_stream_ends_all(is_read: bool) -> None:
    """A Router that ends cancels what is held: nobody may wait for that, also with others' deltas unread."""
    seen: list[str] = []
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def held() -> AsyncGenerator[Delta, None]:
        await waited_for
        yield Delta("", (), 0)

    merged = merge([held(), _stream(1_000_000, seen)])
    await anext(merged)
    if not is_read:
        for _ in range(1000):
            await asyncio.sleep(0)
    waited_for.cancel()
    with pytest.raises(asyncio.CancelledError):
        await _read(merged)
    assert seen[-1] == "closed"


async def test_what_is_cancelled_under_the_last_stream_ends_it_too() -> None:
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def held() -> AsyncGenerator[Delta, None]:
        await waited_for
        yield Delta("", (), 0)

    asyncio.get_running_loop().call_later(0.01, waited_for.cancel)
    with pytest.raises(asyncio.CancelledError):
        await _read(merge([held(), _stream(1, [])]))


async def test_a_slow_reader_slows_the_streams() -> None:
    seen: list[str] = []
    merged = merge([_stream(1_000_000, seen) for _ in range(2)])
    await anext(merged)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(seen) < 20
    await merged.aclose()


async def test_an_event_is_one_line_for_clients_that_split_as_python_does(router: RouterUnderTest) -> None:
    text = "".join(map(chr, (*range(0x00, 0x21), *range(0x7F, 0xA1), *range(0x2027, 0x202B)))) + "é\\日"
    router.answer_with(Delta(text, (1,), 0, FinishReason.STOP))
    for answer in (await router.chat(stream=True), await router.complete(stream=True)):
        *events, done = [line async for line in answer.aiter_lines() if line]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in events]
        assert done == "data: [DONE]"
        assert [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices] == [text]


@pytest.mark.parametrize("pieces", [[event(b"1") + DONE], [event(b"1"), event(b"2"), event(b"3") + DONE]])
async def test_the_last_event_ends_the_body_and_the_source_is_heard_out(pieces: list[bytes]) -> None:
    """A server tells of a disconnect as soon as the body has ended: that must not cut the source short."""
    ended, sent = [], list[Message]()
    body_ended = asyncio.Event()

    async def rest() -> AsyncGenerator[bytes, None]:
        for piece in pieces[1:]:
            yield piece
        await asyncio.sleep(0.01)  # what a source may still have to await
        ended.append("source")

    async def send(message: Message) -> None:
        sent.append(message)
        if not message.get("more_body", True):
            body_ended.set()

    async def receive() -> Message:
        await body_ended.wait()
        return {"type": "http.disconnect"}

    events = rest()
    await SseResponse(pieces[0], events, {}, 60.0)({"type": "http"}, receive, send)
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert [message["body"] for message in bodies] == pieces
    assert [message["more_body"] for message in bodies] == [True] * (len(pieces) - 1) + [False]
    assert ended == ["source"]


async def never(*_messages: Message) -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_client_that_takes_nothing_is_left_and_the_source_hears_why(is_last: bool) -> None:
    heard, sent, takes = list[BaseException](), list[Message](), asyncio.Event()

    async def rest() -> AsyncGenerator[bytes, None]:
        try:
            yield b""
        except AnswerNotTaken as error:
            heard.append(error)
            takes.set()  # too late: nothing is sent any more
            for _ in range(5):
                await asyncio.sleep(0)
            yield event(b"nobody reads this")

    async def send(message: Message) -> None:
        await takes.wait()
        sent.append(message)

    events = rest()
    await anext(events)
    if is_last:
        await events.aclose()
    with pytest.raises(AnswerNotTaken, match=r"nothing of it was taken for 0\.01 seconds") as caught:
        await SseResponse(event(b"1"), events, {}, 0.01)({"type": "http"}, never, send)
    assert heard == ([] if is_last else [caught.value])
    assert sent == []
    assert [content async for content in events] == []


async def test_nor_is_it_waited_for_with_the_end_alone() -> None:
    """Of a stream that ends in an error: its last event does not end the body."""

    async def rest() -> AsyncGenerator[bytes, None]:
        yield event(b"an error")

    async def send(message: Message) -> None:
        if message.get("more_body") is False:
            await never()

    with pytest.raises(AnswerNotTaken):
        async with asyncio.timeout(20):
            await SseResponse(event(b"1"), rest(), {}, 0.01)({"type": "http"}, never, send)


async def test_a_source_may_take_as_long_as_it_likes() -> None:
    """Only what is there for the client can be left unread."""
    sent: list[Message] = []

    async def rest() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.05)
        yield DONE

    async def send(message: Message) -> None:
        sent.append(message)

    await SseResponse(event(b"1"), rest(), {}, 0.01)({"type": "http"}, never, send)
    assert sent[-1]["body"] == DONE
