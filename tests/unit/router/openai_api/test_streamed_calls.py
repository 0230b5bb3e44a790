"""How the calls of an answer come: in a stream as in one piece, cut off, and as they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cache.messages import FinishReason
from tests.fakes.http import events_of
from tests.fakes.tokenizers import CALL
from tests.fakes.tools import WEATHER, a_router


@pytest.mark.parametrize(
    "texts", [[CALL], ["a\n", CALL], [*CALL], [CALL, "\n", CALL], ["no call <tool_call>x</tool_call>"], [""]]
)
async def test_streaming_equals_not_streaming(texts: list[str]) -> None:
    async with a_router(*texts) as router:
        whole = (await router.chat(tools=[WEATHER])).json()["choices"][0]
        streamed = await router.chat(tools=[WEATHER], stream=True)
    choices = [json.loads(event)["choices"][0] for event in events_of(streamed.content)[:-1]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
        whole["finish_reason"]
    ]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == (
        whole["message"]["content"] or ""
    )
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert [call["function"] for call in calls] == [
        call["function"] for call in whole["message"].get("tool_calls", [])
    ]
    assert choices[0]["delta"]["role"] == "assistant"


async def test_an_answer_cut_off_keeps_its_reason() -> None:
    async with a_router(CALL, "<tool_call>{", finish=FinishReason.LENGTH) as router:
        choice = (await router.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == "<tool_call>{"


async def test_a_call_cut_off_is_a_call_with_the_arguments_so_far() -> None:
    """Frameworks took its text, tag and all, for what the model answers; they know what a cut call is."""
    begun = '{"place": "Zü'
    texts = "Well.\n", f'<tool_call>\n{{"name": "weather", "arguments": {begun}'
    async with a_router(*texts) as router:
        assert "tool_calls" not in (await router.chat(tools=[WEATHER])).json()["choices"][0]["message"]
    async with a_router(*texts, finish=FinishReason.LENGTH) as router:
        whole = (await router.chat(tools=[WEATHER])).json()["choices"][0]
        streamed = await router.chat(tools=[WEATHER], stream=True)
    assert whole["finish_reason"] == "length"
    assert whole["message"]["content"] == "Well."
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": begun}
    *_, last = [json.loads(event)["choices"][0] for event in events_of(streamed.content)[:-1]]
    assert last["finish_reason"] == "length"
    (call,) = last["delta"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": begun}


HELD: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": "required", "guided_regex": "(.|\\n)*"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
]


@pytest.mark.parametrize("fields", HELD, ids=lambda fields: str(fields)[:40])
async def test_held_calls_are_streamed_as_they_are_written(fields: dict[str, Any]) -> None:
    """Who fills a form by a call sees it being filled."""
    async with a_router(*CALL) as router:
        whole = (await router.chat(**{"tools": [WEATHER], **fields})).json()["choices"][0]
        streamed = await router.chat(**{"tools": [WEATHER], **fields}, stream=True)
    choices = [json.loads(event)["choices"][0] for event in events_of(streamed.content)[:-1]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    first, *others = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (first["type"], first["function"]) == ("function", {"name": "weather", "arguments": "{"})
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in others)
    arguments = "".join(call["function"]["arguments"] for call in (first, *others))
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": arguments}
    assert arguments == '{"place": "Zürich"}'
    assert len(others) == len(arguments) - 1


@pytest.mark.parametrize(
    ("end", "reason"), [("Zür", "stop"), ('Zürich"', "stop"), ('Zürich"}', "tool_calls"), ("", "tool_calls")]
)
async def test_a_held_call_that_a_stop_string_cut_is_not_why_the_answer_ended(end: str, reason: str) -> None:
    """Its arguments are no JSON, and who is told `tool_calls` reads them. Alone, or behind a whole one."""
    cut = CALL[: CALL.index(end) + len(end)] if end else CALL
    for texts in ([*cut], [CALL, "\n", *cut], [CALL + cut]):
        async with a_router(*texts) as router:
            fields = {"tools": [WEATHER], "tool_choice": "required"}
            whole = (await router.chat(**fields)).json()["choices"][0]
            streamed = await router.chat(**fields, stream=True)
        *_, last = [json.loads(event)["choices"][0] for event in events_of(streamed.content)[:-1]]
        assert whole["finish_reason"] == last["finish_reason"] == reason
        told = whole["message"]["tool_calls"][-1]["function"]["arguments"]
        assert told == '{"place": "Zürich"}'[: len(told)]
        assert (told[-1] == "}") == (reason == "tool_calls")


async def test_calls_that_an_answer_of_any_kind_may_look_like_come_whole() -> None:
    """A regular expression may spell what begins like a call, and is none."""
    fields = {"tools": [WEATHER], "guided_regex": "(.|\n)*"}
    async with a_router(*'<tool_call>{"name": "weather", "arguments": {no') as router:
        streamed = await router.chat(**fields, stream=True)
    choices = [json.loads(event)["choices"][0] for event in events_of(streamed.content)[:-1]]
    assert not any("tool_calls" in choice["delta"] for choice in choices)


async def test_each_held_call_has_its_own_arguments() -> None:
    other = CALL.replace("Zürich", "Ulm")
    async with a_router(*CALL, "\n", *other) as router:
        fields = {"tools": [WEATHER], "tool_choice": "required"}
        whole = (await router.chat(**fields)).json()["choices"][0]
        streamed = await router.chat(**fields, stream=True)
    called = [call["function"]["arguments"] for call in whole["message"]["tool_calls"]]
    assert called == ['{"place": "Zürich"}', '{"place": "Ulm"}']
    put_together = ["", ""]
    for event in events_of(streamed.content)[:-1]:
        for call in json.loads(event)["choices"][0]["delta"].get("tool_calls", []):
            put_together[call["index"]] += call["function"]["arguments"]
    assert put_together == called
