"""A chat's messages: what is accepted becomes what templates read, what is not is named and never quoted."""

from __future__ import annotations

from typing import Any

import pytest

from router.errors import InvalidField, UnsupportedParameter
from router.openai_api.schema import parse_chat

MESSAGES = [{"role": "user", "content": "hello"}]
SECRET = "a secret prompt"


def _chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (SECRET, "messages"),
        ({}, "messages"),
        ([SECRET], "messages[0]"),
        ([{"content": SECRET}], "messages[0].role"),
        ([{"role": SECRET, "content": SECRET}], "messages[0].role"),
        ([{"role": 1, "content": SECRET}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [SECRET]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "refusal", "refusal": SECRET}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "assistant", "content": [{"type": "refusal", "text": SECRET}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "refusal": [SECRET]}], "messages[0].refusal"),
        ([{"role": "user", "content": [{"text": SECRET}]}], "messages[0].content[0]"),
    ],
)
def test_a_wrong_message_is_named_and_never_quoted(messages: Any, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        _chat(messages=messages)
    assert caught.value.param == param
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role"),
        (
            {"role": "assistant", "content": "x", "function_call": {}, "audio": {"id": "x"}},
            "messages[0].audio",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_a_message_of_a_kind_not_implemented_is_named(message: Any, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        _chat(messages=[message])
    assert caught.value.param == param


REFUSAL = {"type": "refusal", "refusal": "I will not."}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [REFUSAL]}, "I will not."),
        ({"content": [{"type": "text", "text": "No. "}, REFUSAL]}, "No. I will not."),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"refusal": "I will not."}, "I will not."),
        ({"content": "", "refusal": "I will not."}, "I will not."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": "Yes.", "refusal": "I will not."}, "Yes."),
    ],
)
def test_what_an_assistant_refused_is_what_it_said(fields: dict[str, Any], content: str) -> None:
    """Such a part got 400, and a message's `refusal` was dropped: the model saw that it had said nothing."""
    (message,) = parse_chat({"model": "m", "messages": [{"role": "assistant", **fields}]}).messages
    assert message.content == content
    assert message.for_template() == {"role": "assistant", "content": content}


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = _chat(messages=[{"role": "developer", "content": parts}])
    assert [(message.role, message.content) for message in body.messages] == [("system", "ab")]


def test_a_messages_name_reaches_the_template_and_is_a_string() -> None:
    (message,) = _chat(messages=[{"role": "user", "content": "x", "name": "ada"}]).messages
    assert message.for_template() == {"role": "user", "content": "x", "name": "ada"}
    (unnamed,) = _chat(messages=[{"role": "user", "content": "x", "name": None}]).messages
    assert "name" not in unnamed.for_template()
    with pytest.raises(InvalidField) as caught:
        _chat(messages=[{"role": "user", "content": "x", "name": 5}])
    assert caught.value.param == "messages[0].name"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_assistants_reasoning_reaches_the_template_and_is_a_string(name: str) -> None:
    def told(role: str, **message: object) -> object:
        return _chat(messages=[{"role": role, "content": "x", **message}]).messages[0].for_template()

    plain = {"role": "assistant", "content": "x"}
    names = ("reasoning", "reasoning_content", "thinking")
    assert told("assistant", **{name: "so"}) == {**plain, **dict.fromkeys(names, "so")}
    assert told("assistant", **{name: None}) == plain
    assert told("user", **{name: "so"}) == {"role": "user", "content": "x"}
    with pytest.raises(InvalidField) as caught:
        told("assistant", **{name: ["so"]})
    assert caught.value.param == f"messages[0].{name}"


def test_vllms_name_of_reasoning_goes_before_the_older_one() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "new", "reasoning_content": "old"}
    assert _chat(messages=[message]).messages[0].reasoning == "new"
