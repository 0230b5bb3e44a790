"""Tools: rendered through the template, calls read back; calls forced, or held to their schemas."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import jsonschema
import openai
import pytest

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from tests.conformance.asking import MESSAGES, assert_refused, cached, chat, client_of
from tests.conformance.rows import row
from tests.fakes.http import RouterUnderTest
from tests.fakes.tokenizers import CHATML, HERMES, a_tokenizer
from tests.http_server import MODEL, scripted_server

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PLACE: Any = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Ulm", "Bern"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
STRICT: Any = {"type": "function", "function": {"name": "forecast", "parameters": PLACE, "strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "forecast"}}


def scripted(*texts: str, template: str) -> RouterUnderTest:
    async def script(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        for index, text in enumerate(texts):
            yield Delta(text, (index,), 0, FinishReason.STOP if index + 1 == len(texts) else None)

    router = RouterUnderTest(tokenizer=a_tokenizer("bytes", template=template), max_model_len=4096)
    router.follow(script)
    return router


@row("tools and tool_choice")
def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    with scripted_server(scripted("x", template=CHATML)) as server, client_of(server) as client:
        assert chat(client, extra_body={"tools": [], "tool_choice": "auto"}).choices
        assert_refused(chat, client, "tools", [TOOL])


@row("tools and tool_choice")
@pytest.mark.parametrize("stream", [True, False])
def test_tools_are_rendered_and_calls_read_back(stream: bool) -> None:
    written = (
        "Let me ",
        "see.\n<tool",
        '_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n',
        "</tool_call>",
    )
    router = scripted(*written, template=HERMES)
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}
    with scripted_server(router) as server, client_of(server) as client:
        if stream:
            with client.chat.completions.stream(**options) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": "Ulm"}
    prompt = router.tokenizer.decode(list(router.calls.requests[0][1].token_ids))
    assert '"name": "weather"' in prompt


def ask(client: openai.OpenAI, *, stream: bool = False, **fields: Any) -> Any:
    options: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [STRICT, NOW],
        "max_tokens": 400,
        "seed": 7,
        **fields,
    }
    if not stream:
        return client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as events:
        return events.get_final_completion().choices[0]


@row("tools and tool_choice")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_is_forced(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    """Of a model whose text means nothing: nothing but what was asked for makes it call."""
    answer = ask(client, stream=stream, tool_choice=choice, parallel_tool_calls=False)
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    if choice == NAMED:
        assert call.function.name == "forecast"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, PLACE if call.function.name == "forecast" else {"maxProperties": 0})


@row("tools and tool_choice")
def test_every_answer_of_several_calls_and_each_for_itself(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [STRICT, NOW], "tool_choice": NAMED}
    answers = client.chat.completions.create(**options, n=6, seed=1, max_tokens=200).choices
    written = {answer.message.tool_calls[0].function.arguments for answer in answers}  # type: ignore[index,union-attr]
    for arguments in written:
        jsonschema.validate(json.loads(arguments), PLACE)
    assert len(written) > 1


@row("tools and tool_choice")
def test_allowed_tools_leave_the_prompt_as_it_is(client: openai.OpenAI) -> None:
    def allowed(mode: str, tool: Any) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}

    for tool in (NOW, NAMED):
        answer = ask(client, tool_choice=allowed("required", tool), parallel_tool_calls=False)
        assert answer.message.tool_calls[0].function.name == tool["function"]["name"]
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [STRICT, NOW], "max_tokens": 1}
    free = client.chat.completions.create(**options, tool_choice=allowed("auto", NOW))
    assert cached(free) > 0


@row("tools and tool_choice")
def test_a_structure_beside_tools_is_that_or_calls(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(4):
        answer = ask(client, response_format=form, seed=seed, parallel_tool_calls=False)
        if answer.message.tool_calls:
            assert answer.finish_reason == "tool_calls"
        else:
            jsonschema.validate(json.loads(answer.message.content), schema)


@row("tools and tool_choice")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
                ]
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_called_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
