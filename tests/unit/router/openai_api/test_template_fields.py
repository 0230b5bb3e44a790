"""The chat template's own variables, as requests set them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.http import MODEL, RouterUnderTest, error_of
from tests.fakes.tokenizers import CHATML, EFFORT, THINKING, a_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
NO_THOUGHT = "<think>\n\n</think>\n\n"


def a_router(template: str) -> RouterUnderTest:
    return RouterUnderTest(tokenizer=a_tokenizer("bytes", template=template), max_model_len=4096)


async def rendered(router: RouterUnderTest, **fields: Any) -> str:
    """The prompt that a replica is sent."""
    answer = await router.chat("hello", **fields)
    assert answer.status_code == 200, answer.text
    return router.encoder.decode(router.calls.requests[-1][1].token_ids)


async def test_a_chats_variables_reach_its_template() -> None:
    async with a_router(THINKING) as router:
        plain = await rendered(router)
        for variables, end in (
            ({"enable_thinking": False}, NO_THOUGHT),
            ({"enable_thinking": True}, ""),
            ({}, ""),
            ({"nobody_knows": [1, None, {"a": "b"}]}, ""),
        ):
            assert await rendered(router, chat_template_kwargs=variables) == plain + end
        assert await rendered(router) == plain  # what was tokenized with others is not taken for this


async def test_tokenize_has_the_variables_of_a_chat() -> None:
    async with a_router(THINKING) as router:
        for variables in ({"enable_thinking": False}, {}):
            fields: dict[str, Any] = {"messages": HELLO, "chat_template_kwargs": variables}
            told = (await router.client.post("/tokenize", json=fields)).json()
            await router.chat("hello", chat_template_kwargs=variables)
            assert told["tokens"] == list(router.calls.requests[-1][1].token_ids)


@pytest.mark.parametrize(
    ("variables", "param"),
    [
        ("enable_thinking", "chat_template_kwargs"),
        ([], "chat_template_kwargs"),
        ({"text": "x" * (16 << 10)}, "chat_template_kwargs"),
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
        ({"namespace": 1}, "messages"),  # the template then does not render
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_what_no_template_may_be_given_is_refused(path: str, variables: Any, param: str) -> None:
    async with a_router("{% set ns = namespace(a=1) %}" + THINKING) as router:
        body = {"model": MODEL, "messages": HELLO, "chat_template_kwargs": variables}
        answer = await router.client.post(path, json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_arithmetic_that_a_variable_breaks_is_the_clients_error() -> None:
    async with a_router("{{ 1 // budget }}" + CHATML) as router:
        answer = await router.chat("hello", chat_template_kwargs={"budget": 0})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "messages")


@pytest.mark.parametrize("name", ["chat_template_kwargs", "reasoning_effort", "tools"])
async def test_a_text_has_no_template(name: str) -> None:
    value = {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}.get(
        name, [{"type": "function", "function": {"name": "f"}}]
    )
    async with a_router(EFFORT) as router:
        answer = await router.client.post("/tokenize", json={"prompt": "x", name: value})
        assert (answer.status_code, error_of(answer)["param"]) == (400, name)


async def test_an_effort_is_the_templates_variable_of_that_name() -> None:
    async with a_router(EFFORT) as router:
        plain = await rendered(router)
        high = await rendered(router, reasoning_effort="high")
        assert high == plain + "Reasoning: high\n"
        assert await rendered(router, chat_template_kwargs={"reasoning_effort": "high"}) == high
        body = {"messages": HELLO, "reasoning_effort": "high"}
        told = (await router.client.post("/tokenize", json=body)).json()
        assert router.encoder.decode(told["tokens"]) == high


@pytest.mark.parametrize(
    ("template", "fields", "code", "says"),
    [
        (THINKING, {"reasoning_effort": "low"}, "unsupported_parameter", "chat_template_kwargs"),
        (EFFORT, {"reasoning_effort": "most"}, "invalid_value", "none, minimal, low, medium, high, xhigh"),
        (EFFORT, {"reasoning_effort": 3}, "invalid_value", "none, minimal, low, medium, high, xhigh"),
        (
            EFFORT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "invalid_value",
            "the same",
        ),
    ],
)
async def test_an_effort_that_cannot_be_followed_is_refused(
    template: str, fields: dict[str, Any], code: str, says: str
) -> None:
    async with a_router(template) as router:
        error = error_of(await router.chat("hello", **fields))
        assert (error["param"], error["code"]) == ("reasoning_effort", code)
        assert says in error["message"]
