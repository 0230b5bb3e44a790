"""Tools: rendered through the template, and calls read back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from tests.conformance.asking import MESSAGES, assert_refused, chat, client_of
from tests.conformance.rows import row
from tests.fakes.http import RouterUnderTest
from tests.fakes.tokenizers import HERMES, a_tokenizer
from tests.http_server import MODEL, scripted_server

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@row("tools and tool_choice")
def test_tools_are_refused_where_the_template_has_no_place_for_them(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"tools": [], "tool_choice": "auto"}).choices
    assert_refused(chat, client, "tools", [TOOL])


@row("tools and tool_choice")
@pytest.mark.parametrize("stream", [True, False])
def test_tools_are_rendered_and_calls_read_back(stream: bool) -> None:
    written = [
        "Let me ",
        "see.\n<tool",
        '_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n',
        "</tool_call>",
    ]

    async def script(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        for index, text in enumerate(written):
            yield Delta(text, (index,), 0, FinishReason.STOP if index == 3 else None)

    router = RouterUnderTest(tokenizer=a_tokenizer("bytes", template=HERMES), max_model_len=4096)
    router.follow(script)
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}
    with scripted_server(router) as server, client_of(server) as client:
        if stream:
            with client.chat.completions.stream(**options) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**{**options, "tool_choice": choice})
            assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": "Ulm"}
    prompt = router.tokenizer.decode(list(router.calls.requests[0][1].token_ids))
    assert '"name": "weather"' in prompt
