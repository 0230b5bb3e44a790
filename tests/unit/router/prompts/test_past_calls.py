"""Calls of earlier turns are in the prompt, however a template and a client have it with an empty content."""

from __future__ import annotations

from typing import Any

import pytest

from router.errors import InvalidField
from router.prompts.chat import Chat
from router.prompts.past_calls import CallsBesideText, EmptyContent, PastCalls
from router.prompts.prompt import PromptEncoder
from tests.fakes.tokenizers import CHATML, HARMONY, HERMES, a_tokenizer

_CONTENT = "{{ message['content'] }}"
_CALLS = (
    "{% for call in message['tool_calls'] %}(call {{ call['function']['name'] }} "
    "{{ call['function']['arguments'] | tojson }}){% endfor %}"
)


def template(of_assistant: str) -> str:
    """Of a body for the assistant's messages; the others are as their content is."""
    return (
        "{% for message in messages %}[{{ message['role'] }}]"
        f"{{% if message['role'] == 'assistant' %}}{of_assistant}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )


SHAPES = {
    # As DeepSeek V3 has it: calls are told by null, and their arguments joined to text.
    "deepseek": template(
        "{% if message['content'] is none %}{% for call in message['tool_calls'] %}"
        "{{ '(call ' + call['function']['name'] + ' ' + call['function']['arguments'] + ')' }}{% endfor %}"
        "{% else %}" + _CONTENT + "{% endif %}"
    ),
    "calls where content is none": template(
        "{% if message['content'] is none %}" + _CALLS + "{% else %}" + _CONTENT + "{% endif %}"
    ),
    "calls where there is no content": template(
        "{% if message['content'] is not defined %}" + _CALLS + "{% else %}" + _CONTENT + "{% endif %}"
    ),
    "none by name": template(
        "{{ message['content'] }}{% if message['tool_calls'] %}" + _CALLS + "{% endif %}"
    ),
    "only text": template(
        "{{ message['content'] + '' }}{% if message.tool_calls %}" + _CALLS + "{% endif %}"
    ),
    "text is looked into": template(
        "{{ message.content.split('</think>')[-1] }}{% if message.tool_calls %}" + _CALLS + "{% endif %}"
    ),
    "calls are looked for": template(
        "{% if 'tool_calls' in message %}" + _CALLS + "{% else %}{{ message.content }}{% endif %}"
    ),
    "the word None": "None, says the template. "
    + template("{{ message.content or '' }}{% if message.tool_calls %}" + _CALLS + "{% endif %}"),
    "arguments as they are": template(
        "{{ message.content or '' }}{% for call in message.tool_calls %}"
        "(call {{ call.function.name }} {{ call.function.arguments }}){% endfor %}"
    ),
    "hermes": HERMES,
    "harmony": HARMONY,
}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"place": "Ulm"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CONTENTS: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}]


def messages(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("content", CONTENTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_the_call_is_in_the_prompt(shape: str, content: dict[str, Any], tools: Any) -> None:
    """Of templates that want null for a content all calls were left out, and of some that want none."""
    encoder = PromptEncoder(a_tokenizer("bytes", template=SHAPES[shape]), name="m")
    text = encoder.render(Chat(messages(content), tools))
    assert "weather" in text.split("Weather?")[1]
    assert '"place": "Ulm"' in text
    assert "None" not in text.removeprefix("None, says the template.")
    assert "sunny" in text


def test_what_the_client_sent_stays_where_its_calls_are_written() -> None:
    shape = template("{{ 'null' if message.content is none else 'text' }}" + _CALLS)
    encoder = PromptEncoder(a_tokenizer("bytes", template=shape), name="m")
    assert "[assistant]null(call" in encoder.render(Chat(messages({"content": None})))
    assert "[assistant]text(call" in encoder.render(Chat(messages({"content": ""})))
    assert "[assistant]text(call" in encoder.render(Chat(messages({"content": "Let me see."})))


@pytest.mark.parametrize(
    "shape", [CHATML, template("{{ raise_exception('no assistants') }}"), "{{ raise_exception('no chats') }}"]
)
def test_templates_that_write_no_calls_are_handed_texts(shape: str) -> None:
    encoder = PromptEncoder(a_tokenizer("bytes", template=shape), name="m")
    tried = PastCalls.tried(lambda each: encoder.render(Chat(each)))
    assert tried == PastCalls(EmptyContent.TEXT, EmptyContent.TEXT, CallsBesideText.WRITTEN, False)


BESIDE = {"content": "Let me see."}
LOSING = ("deepseek", "calls where content is none", "calls where there is no content")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_a_call_beside_a_text_is_in_the_prompt(shape: str, tools: Any) -> None:
    """Of templates that write the calls of messages without a text alone, it was left out."""
    encoder = PromptEncoder(a_tokenizer("bytes", template=SHAPES[shape]), name="m")
    text = encoder.render(Chat(messages(BESIDE), tools)).split("Weather?")[1]
    assert '"place": "Ulm"' in text
    assert text.index("weather") < text.index("sunny")
    if shape != "calls are looked for":  # its text is left out, as Llama 3's are
        assert text.index("Let me see.") < text.index("weather")
    if shape in LOSING:
        assert text.startswith("[assistant]Let me see.[assistant](call weather")


def test_a_thought_stays_with_the_text() -> None:
    shape = template(
        "{% if message.content is none %}"
        + _CALLS
        + "{% else %}<{{ message.reasoning }}>"
        + _CONTENT
        + "{% endif %}"
    )
    encoder = PromptEncoder(a_tokenizer("bytes", template=shape), name="m")
    said = messages({**BESIDE, "reasoning": "hm"})
    assert "[assistant]<hm>Let me see.[assistant](call weather" in encoder.render(Chat(said))


def test_calls_that_cannot_be_told_beside_a_text_are_refused_by_name() -> None:
    """They would be missing, and nobody would know."""
    alternating = (
        "{% for message in messages %}{% if loop.previtem and loop.previtem.role == message.role %}"
        "{{ raise_exception('alternate') }}{% endif %}{% endfor %}" + SHAPES["calls where content is none"]
    )
    encoder = PromptEncoder(a_tokenizer("bytes", template=alternating), name="m")
    assert "(call weather" in encoder.render(Chat(messages({"content": None})))
    with pytest.raises(InvalidField, match="must be null: the chat template leaves out") as caught:
        encoder.render(Chat(messages(BESIDE)))
    assert caught.value.param == "messages[1].content"


def test_a_text_that_is_lost_beside_its_calls_is_no_way_out() -> None:
    """Handed apart, it would be the text that is missing."""
    last_alone = (
        "{% for message in messages %}{% if loop.last or loop.nextitem.role != message.role %}"
        "{% if message['content'] is none %}" + _CALLS + "{% else %}" + _CONTENT + "{% endif %}"
        "{% endif %}{% endfor %}"
    )
    encoder = PromptEncoder(a_tokenizer("bytes", template=last_alone), name="m")
    with pytest.raises(InvalidField, match="must be null: the chat template leaves out"):
        encoder.render(Chat(messages(BESIDE)))


def test_who_speaks_is_told_with_the_calls_too() -> None:
    shape = template(
        "({{ message.name }})"
        "{% if message.content is none %}" + _CALLS + "{% else %}" + _CONTENT + "{% endif %}"
    )
    encoder = PromptEncoder(a_tokenizer("bytes", template=shape), name="m")
    text = encoder.render(Chat(messages({**BESIDE, "name": "Ada"})))
    assert "[assistant](Ada)Let me see.[assistant](Ada)(call weather" in text


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats with tools and chats without apart."""
    tried: list[object] = []
    own = PastCalls.tried
    monkeypatch.setattr(PastCalls, "tried", lambda render: tried.append(render) or own(render))
    encoder = PromptEncoder(a_tokenizer("bytes", template=HERMES), name="m")
    for tools in (TOOLS, TOOLS, None, None):
        encoder.render(Chat(messages({"content": None}), tools))
    assert len(tried) == 2


def test_a_clients_tools_do_not_decide() -> None:
    """What is found out for one chat holds for all."""
    shape = (
        "{% for tool in tools %}{{ tool.function.name + '' }}{% endfor %}"
        + SHAPES["calls where content is none"]
    )
    encoder = PromptEncoder(a_tokenizer("bytes", template=shape), name="m")
    odd = Chat(messages({"content": None}), [{"type": "function", "function": {"name": 3}}])
    with pytest.raises(Exception, match="cannot render"):
        encoder.render(odd)
    assert "(call weather" in encoder.render(Chat(messages({"content": None}), TOOLS))


def test_arguments_joined_to_text_are_json() -> None:
    encoder = PromptEncoder(a_tokenizer("bytes", template=SHAPES["deepseek"]), name="m")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert encoder.render(Chat(said)).endswith('(call weather {"place": "Köln"})')
    assert call["function"] == {"name": "weather", "arguments": {"place": "Köln"}}


def test_messages_that_call_nothing_stay_as_they_are() -> None:
    shape = template("{{ message.content is none }}")
    encoder = PromptEncoder(a_tokenizer("bytes", template=shape), name="m")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    assert encoder.render(Chat(said)) == "[user]a[assistant]False"


def test_ids_are_those_of_the_text() -> None:
    tokenizer = a_tokenizer("bytes", template=SHAPES["calls where content is none"])
    cached, whole = PromptEncoder(tokenizer, name="m"), PromptEncoder(tokenizer, name="m", cache_bytes=0)
    chat = Chat(messages({"content": None}), TOOLS)
    assert cached.chat(chat) == whole.chat(chat) == cached.text(cached.render(chat), add_special_tokens=False)
