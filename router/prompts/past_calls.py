"""What a template is handed for a message that calls tools, so that the calls are in the prompt.

Of one that only calls: a content that is null, nothing, or no text. Of one that says something too, and whose
calls the template then leaves out: its text and its calls as two messages. Arguments are the object that they
are, or its JSON where a template joins it to other text, as DeepSeek V3's does, or writes it as Python would.

Clients send null or "", and templates tell calls by it in ways of their own. DeepSeek V3's writes the calls
of a message whose content is null, and of no other; some write "None" for null, or fail on it, and some
look whether there is a content at all. What a template does is not read but tried: on a chat with one call.
Knows the shape of OpenAI's messages; knows neither tokenizers nor requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.errors import InvalidField


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


class CallsBesideText(StrEnum):
    """What becomes of the calls of a message that has a text, too."""

    WRITTEN = "written"  # or none are, with a text or without
    APART = "apart"  # where they have a message of their own behind the text's
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class PastCalls:
    """Of one template, by what the client sent. It stays what it is where the template writes the calls."""

    of_null: EmptyContent
    of_text: EmptyContent
    beside_text: CallsBesideText
    arguments_are_text: bool  # JSON, and no object

    @classmethod
    def tried(cls, render: Callable[[list[dict[str, Any]]], str]) -> PastCalls:
        """render: by the template; may raise. An empty text for templates that write no calls."""
        of_objects = cls._tried_with(render, _CALLING, arguments_are_text=False)
        of_texts = of_objects or cls._tried_with(render, _with_text(_CALLING), arguments_are_text=True)
        return of_texts or cls(EmptyContent.TEXT, EmptyContent.TEXT, CallsBesideText.WRITTEN, False)

    @classmethod
    def _tried_with(
        cls,
        render: Callable[[list[dict[str, Any]]], str],
        calling: dict[str, Any],
        *,
        arguments_are_text: bool,
    ) -> PastCalls | None:
        """calling: a message without a content. None where its call is never written."""
        with_text = _rendered(render, {**calling, "content": _TEXT})
        num_nones = 0 if with_text is None else with_text.count("None")

        def writes_call(content: EmptyContent) -> bool:
            text = _rendered(render, content.given(calling))
            if text is None or _NAME not in text:
                return False
            return _AS_PYTHON not in text and text.count("None") <= num_nones

        writing = list(filter(writes_call, EmptyContent))
        if not writing:
            return None
        of_null = writing[0]
        of_text = EmptyContent.TEXT if EmptyContent.TEXT in writing else of_null
        beside_text = CallsBesideText.WRITTEN
        if with_text is not None and _NAME not in with_text:
            apart = _rendered(render, *_apart({**calling, "content": _TEXT}, of_null))
            is_whole = apart is not None and _NAME in apart and _TEXT in apart
            beside_text = CallsBesideText.APART if is_whole else CallsBesideText.LOST
        return cls(of_null, of_text, beside_text, arguments_are_text)

    def put_into(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template is handed them. Raises InvalidField where it would leave calls out."""
        handed: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            if self.arguments_are_text and message.get("tool_calls"):
                message = _with_text(message)
            if only_calls(message):
                handed.append(self._of(message).given(message))
            elif not message.get("tool_calls") or self.beside_text is CallsBesideText.WRITTEN:
                handed.append(message)
            elif self.beside_text is CallsBesideText.APART:
                handed += _apart(message, self.of_null)
            else:
                raise InvalidField(
                    f"messages[{index}].content",
                    f"'messages[{index}].content' must be null: the chat template leaves out the tool calls "
                    "of a message that has a text.",
                )
        return handed

    def _of(self, message: dict[str, Any]) -> EmptyContent:
        return self.of_null if message.get("content") is None else self.of_text


def only_calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Its calls with their arguments as JSON."""
    return {**message, "tool_calls": [_call_with_text(call) for call in message["tool_calls"]]}


def _call_with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _apart(message: dict[str, Any], empty: EmptyContent) -> list[dict[str, Any]]:
    """What it thinks and says, and then its calls."""
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    calling: dict[str, Any] = {
        name: message[name] for name in ("role", "name", "tool_calls") if name in message
    }
    return [said, empty.given(calling)]


_NAME = "look_up_the_tide"
_TEXT = "The tables have it."
_CALL_ID = "call00001"  # of nine letters and digits, as Mistral's templates want them
_ARGUMENTS = {"place": "Brest"}
_AS_PYTHON = str(_ARGUMENTS)  # no model was taught to write them so
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_CALLING: dict[str, Any] = {"role": "assistant", "tool_calls": [_CALL]}
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
A_TOOL: dict[str, Any] = {  # to try a template for chats with tools on
    "type": "function",
    "function": {"name": "measure", "description": "Measures.", "parameters": _PLACE},
}


def _rendered(render: Callable[[list[dict[str, Any]]], str], *messages: dict[str, Any]) -> str | None:
    """A chat with these messages; None where the template fails on it."""
    question = {"role": "user", "content": "When is high water?"}
    answer = {"role": "tool", "tool_call_id": _CALL_ID, "name": "tide", "content": "At six."}
    try:
        return render([question, *messages, answer])
    except Exception:  # of template code, whatever it is
        return None
