"""What a template is handed as the content of a message that only calls tools: null, nothing, or no text.

Clients send null or "", and templates tell calls by it in ways of their own. DeepSeek V3's writes the calls
of a message whose content is null, and of no other; some write "None" for null, or fail on it, and some
look whether there is a content at all. What a template does is not read but tried: on a chat with one call.
Knows the shape of OpenAI's messages; knows neither tokenizers nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class EmptyContent(StrEnum):
    NULL = "null"
    ABSENT = "absent"
    TEXT = "text"  # of no characters

    def given(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with it for its content."""
        others = {name: value for name, value in message.items() if name != "content"}
        if self is EmptyContent.ABSENT:
            return others
        return {**others, "content": None if self is EmptyContent.NULL else ""}


@dataclass(frozen=True, slots=True)
class EmptyContents:
    """Of one template, by what the client sent. It stays what it is where the template writes the calls."""

    of_null: EmptyContent
    of_text: EmptyContent

    @classmethod
    def tried(cls, render: Callable[[list[dict[str, Any]]], str]) -> EmptyContents:
        """render: by the template; may raise. An empty text for templates that write no calls."""
        with_text = _rendered(render, {**_CALLING, "content": "Yes"})
        num_nones = 0 if with_text is None else with_text.count("None")

        def writes_call(content: EmptyContent) -> bool:
            text = _rendered(render, content.given(_CALLING))
            return text is not None and _NAME in text and text.count("None") <= num_nones

        writing = list(filter(writes_call, EmptyContent)) or [EmptyContent.TEXT]
        return cls(writing[0], EmptyContent.TEXT if EmptyContent.TEXT in writing else writing[0])

    def put_into(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template is handed them."""
        return [self._of(message).given(message) if only_calls(message) else message for message in messages]

    def _of(self, message: dict[str, Any]) -> EmptyContent:
        return self.of_null if message.get("content") is None else self.of_text


def only_calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


_NAME = "look_up_the_tide"
_CALL_ID = "call00001"  # of nine letters and digits, as Mistral's templates want them
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {"place": "Brest"}}}
_CALLING: dict[str, Any] = {"role": "assistant", "tool_calls": [_CALL]}
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
A_TOOL: dict[str, Any] = {  # to try a template for chats with tools on
    "type": "function",
    "function": {"name": "measure", "description": "Measures.", "parameters": _PLACE},
}


def _rendered(render: Callable[[list[dict[str, Any]]], str], message: dict[str, Any]) -> str | None:
    """A chat with this message; None where the template fails on it."""
    question = {"role": "user", "content": "When is high water?"}
    answer = {"role": "tool", "tool_call_id": _CALL_ID, "name": "tide", "content": "At six."}
    try:
        return render([question, message, answer])
    except Exception:  # of template code, whatever it is
        return None
