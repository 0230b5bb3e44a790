"""Answers that come as server-sent events: the bytes, chunk by chunk."""

from __future__ import annotations

import json

import pytest

from cache.messages import Delta, FinishReason
from tests.fakes.http import RouterUnderTest, events_of


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_a_stream_has_one_finish_reason_then_done_and_nothing_after(
    router: RouterUnderTest, path: str
) -> None:
    answer = await getattr(router, path)(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(answer.content)
    assert last == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert len({json.loads(chunk)["id"] for chunk in chunks}) == 1
    assert "usage" not in json.loads(chunks[0])


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_streaming_equals_not_streaming(router: RouterUnderTest, path: str) -> None:
    whole = (await getattr(router, path)("x")).json()
    streamed = await getattr(router, path)("x", stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in events_of(streamed.content)[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    texts = [
        choice.get("text") or choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    whole_choice = whole["choices"][0]
    assert "".join(texts) == (whole_choice.get("text") or whole_choice["message"]["content"])


async def test_the_role_comes_with_the_first_content_and_only_there(router: RouterUnderTest) -> None:
    router.answer_with(
        Delta("", (1,), 0),  # half a character: a token, no text
        Delta("ü", (2,), 0),
        Delta("b", (3,), 0),
        Delta("", (4,), 0, FinishReason.STOP),
    )
    answer = await router.chat(stream=True)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events_of(answer.content)[:-1]]
    assert deltas == [{"role": "assistant", "content": "ü"}, {"content": "b"}, {}]


async def test_an_empty_answer_still_has_role_and_finish_reason(router: RouterUnderTest) -> None:
    router.answer_with(Delta("", (4,), 0, FinishReason.STOP))
    answer = await router.chat(stream=True)
    (choice,) = json.loads(events_of(answer.content)[0])["choices"]
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "stop"


async def test_continuous_usage_counts_up(router: RouterUnderTest) -> None:
    answer = await router.complete(stream=True, stream_options={"continuous_usage_stats": True})
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events_of(answer.content)[:-1]]
    assert counts == [2, 4, 5]


async def test_text_with_line_breaks_stays_one_event(router: RouterUnderTest) -> None:
    text = "a\n\nb\r\n\u2028data: [DONE]\n\n"
    router.answer_with(Delta(text, (1,), 0, FinishReason.STOP))
    events = events_of((await router.complete(stream=True)).content)
    assert len(events) == 2
    assert json.loads(events[0])["choices"][0]["text"] == text
