"""Thoughts over HTTP: apart from the content, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from tests.fakes.http import RouterUnderTest, events_of
from tests.fakes.tokenizers import CALL, CHATML, CHATML_TOKENS, HERMES, THINKING, a_tokenizer

WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}
OPENED = CHATML.replace("assistant\n", "assistant\n<think>\n")  # DeepSeek R1: the prompt opens the thought
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}


def a_router(
    *texts: str,
    template: str = THINKING,
    finish: FinishReason = FinishReason.STOP,
    special: Sequence[AddedToken] = (),
    **config: Any,
) -> RouterUnderTest:
    """A Router of a model with this template, that answers these texts, one delta each."""
    tokenizer = a_tokenizer("bytes", template=template, added=[*CHATML_TOKENS, *special])
    router = RouterUnderTest(tokenizer=tokenizer, max_model_len=4096, **config)
    router.say(*texts, finish=finish)
    return router


async def message_of(router: RouterUnderTest, **fields: Any) -> dict[str, Any]:
    answer = await router.chat("Hi", **fields)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (THINKING, "<think>\nhm\n</think>\n\nHello"),
        (OPENED, "hm\n</think>\n\nHello"),
        (OPENED, "<think>hm</think>Hello"),
    ],
)
async def test_a_thought_is_apart_from_the_content(template: str, text: str) -> None:
    async with a_router(text, template=template) as router:
        assert await message_of(router) == {
            "role": "assistant",
            "content": "Hello",
            "reasoning_content": "hm",
            "refusal": None,
        }


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (THINKING, {}, "Hello"),
        (THINKING, {"chat_template_kwargs": {"enable_thinking": False}}, "Hello"),
        (CHATML, {}, "<think>hm</think>Hello"),  # a model that nobody taught to think
        (THINKING, {"response_format": SCHEMA}, '"<think>hm</think>"'),  # constrained from its first token on
        (OPENED, {"response_format": SCHEMA}, '"hm</think>"'),
        (OPENED, {"guided_choice": ["hm</think>a", "b"]}, "hm</think>a"),
    ],
)
async def test_no_thought_is_looked_for_where_there_can_be_none(
    template: str, fields: dict[str, Any], text: str
) -> None:
    async with a_router(text, template=template) as router:
        assert await message_of(router, **fields) == {"role": "assistant", "content": text, "refusal": None}


async def test_a_thought_need_not_end() -> None:
    async with a_router("<think>\nhm", finish=FinishReason.LENGTH) as router:
        choice = (await router.chat("Hi")).json()["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "hm")
    assert choice["finish_reason"] == "length"


async def test_a_call_in_a_thought_is_none() -> None:
    async with a_router(f"<think>I could use {CALL} but no</think>\n\nNo call") as router:
        choice = (await router.chat("Hi", tools=[WEATHER])).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == f"I could use {CALL} but no"
    assert choice["message"]["content"] == "No call"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("strict", [False, True])  # text around calls is free with both
async def test_a_call_behind_a_thought_is_one(strict: bool) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {**WEATHER, "function": {"name": "weather", "parameters": parameters, "strict": strict}}
    async with a_router(f"<think>hm</think>\n\n{CALL}") as router:
        choice = (await router.chat("Hi", tools=[tool])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "hm")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_a_forced_call_has_no_thought_before_it() -> None:
    """With a prompt that opens one, too: every token is held to the call."""
    async with a_router(CALL, template=HERMES.removesuffix("{% endif %}") + "<think>\n{% endif %}") as router:
        message = await message_of(router, tools=[WEATHER], tool_choice="required")
    assert "reasoning_content" not in message
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize(
    "texts",
    [
        [*"<think>\nhm, hm\n</think>\n\nHello"],
        ["<think>hm</think>Hello"],
        ["<think>", "hm", "</think>"],
        ["<think>a</thi", "nk>b"],
        [*f"<think>{CALL}</think>Look: {CALL}"],
        ["Hello"],
        [""],
    ],
)
async def test_streaming_equals_not_streaming(texts: list[str]) -> None:
    async with a_router(*texts) as router:
        whole = await message_of(router, tools=[WEATHER])
        streamed = await router.chat("Hi", tools=[WEATHER], stream=True)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events_of(streamed.content)[:-1]]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (whole.get(name) or "")
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls == [call["function"] for call in whole.get("tool_calls", [])]
    assert [index for index, delta in enumerate(deltas) if "role" in delta] == [0]


async def test_a_thought_is_streamed_as_it_is_thought() -> None:
    async with a_router("<think>", "one", " two", "</think>", "Hello") as router:
        streamed = await router.chat("Hi", stream=True)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events_of(streamed.content)[:-1]]
    assert deltas == [
        {"role": "assistant", "content": None, "reasoning_content": "one"},
        {"reasoning_content": " two"},
        {"content": "Hello"},
    ]


async def test_each_answer_has_its_own_thought() -> None:
    async def script(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        for choice in (0, 1):
            yield Delta("<think>", (1,), 0, choice=choice)
        for choice in (0, 1):
            yield Delta(f"{choice}</think>Hello", (1,), 0, FinishReason.STOP, choice=choice)

    async with a_router("") as router:
        router.follow(script)
        choices = (await router.chat("Hi", n=2)).json()["choices"]
    assert [choice["message"]["reasoning_content"] for choice in choices] == ["0", "1"]


async def test_thoughts_can_be_left_in_the_content() -> None:
    text = "<think>hm</think>Hello"
    async with a_router(text, separate_reasoning=False) as router:
        assert await message_of(router) == {"role": "assistant", "content": text, "refusal": None}


async def test_tags_that_no_text_has_are_not_looked_for() -> None:
    """Whatever the prompt has opened: its end would never come."""
    special = [AddedToken("</think>", special=True, normalized=False)]
    async with a_router("hmHello", template=OPENED, special=special) as router:
        assert await message_of(router) == {"role": "assistant", "content": "hmHello", "refusal": None}
