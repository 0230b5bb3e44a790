"""A chat's messages as checked values: texts, calls made in earlier turns, and the answers to them.

Knows the API's shape of messages and what chat templates read; knows neither templates nor tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo

from router.errors import InvalidField, UnsupportedParameter
from router.openai_api.body import strictly_parsed
from router.openai_api.checked import limits_of

# The API treats `developer` as the newer name of `system`; chat templates know the old one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TOOL_ROLE = "tool"
# Who only called or thought, and what came of a call: null is no text.
_MAY_BE_EMPTY = ("assistant", _TOOL_ROLE)
_PART_TYPES = ("text", "refusal")  # the second of an assistant, who would not answer


class CalledFunction(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    arguments: dict[str, Any]  # sent as JSON in a string; templates want it as the object it is


class PastCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    model_config = ConfigDict(frozen=True)

    id: str | None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates read calls."""
        named = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**named, "type": "function", "function": function}


class ChatMessage(BaseModel):
    """One message, its content joined to plain text."""

    model_config = ConfigDict(frozen=True)

    role: str
    content: str | None  # None where a message is nothing but calls and says so; "" of thoughts alone
    tool_calls: tuple[PastCall, ...] = ()  # of an assistant
    tool_call_id: str | None = None  # of a tool's answer
    name: str | None = None  # of who speaks, among several of one role; many templates do not look at it
    reasoning: str | None = None  # of an assistant, before the content; templates show the latest turns'

    def for_template(self) -> dict[str, Any]:
        """As chat templates read messages."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None:  # templates have one of these names for it
            message["reasoning"] = message["reasoning_content"] = self.reasoning
            # gpt-oss's has a single place before a call, and raises where content is there too. Left out it
            # would be filled in by transformers.
            message["thinking"] = "" if self.tool_calls and self.content else self.reasoning
        return message


def to_messages(value: object, info: ValidationInfo) -> tuple[ChatMessage, ...]:
    """The field `messages`, checked. Raises InvalidField or UnsupportedParameter."""
    limit = limits_of(info).max_messages
    if not isinstance(value, list) or not 1 <= len(value) <= limit:
        raise InvalidField("messages", f"'messages' must be a list of 1 to {limit} messages.")
    # Each has a message of its own for its answer. 140,000 fit a body, and stop the event loop for seconds.
    if sum(len(calls) for item in value for calls in _lists_of_calls(item)) > limit:
        raise InvalidField("messages", f"'messages' must have at most {limit} tool calls in all of them.")
    return tuple(_to_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _lists_of_calls(message: object) -> list[list[object]]:
    """The message's, if it has one; what is none is found to be wrong later."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return [calls] if isinstance(calls, list) else []


def _to_message(value: object, at: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidField(at, f"'{at}' must be an object with 'role' and 'content'.")
    role = value.get("role")
    if role == "function":
        raise UnsupportedParameter(f"{at}.role", f'\'{at}.role\': "function" is not supported: use "tool".')
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidField(f"{at}.role", f"'{at}.role' must be one of {', '.join(_ROLES)}.")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise UnsupportedParameter(f"{at}.{name}", f"'{at}.{name}' is not supported by this server.")
    calls = _to_calls(value.get("tool_calls"), role, f"{at}.tool_calls")
    speaker = value.get("name")
    if speaker is not None and not isinstance(speaker, str):
        raise InvalidField(f"{at}.name", f"'{at}.name' must be a string.")
    return ChatMessage.model_construct(
        role=_ROLES[role],
        content=_to_content(value, role, at, has_calls=bool(calls)),
        tool_calls=calls,
        tool_call_id=_to_call_id(value.get("tool_call_id"), role, f"{at}.tool_call_id"),
        name=speaker,
        reasoning=_to_reasoning(value, role, at),
    )


def _to_content(message: dict[str, Any], role: str, at: str, *, has_calls: bool) -> str | None:
    content = message.get("content")
    if role == "assistant":
        refusal = message.get("refusal")  # said in place of a content
        if refusal is not None and not isinstance(refusal, str):
            raise InvalidField(f"{at}.refusal", f"'{at}.refusal' must be a string.")
        content = refusal if refusal and not content else content
    if content is None and role in _MAY_BE_EMPTY:
        return None if has_calls else ""  # what templates are handed for it: router/prompts/past_calls.py
    return _to_text(content, f"{at}.content", _PART_TYPES if role == "assistant" else _PART_TYPES[:1])


def _to_reasoning(message: dict[str, Any], role: str, at: str) -> str | None:
    """vLLM calls it `reasoning`, and once called it as most clients and templates do."""
    if role != "assistant":
        return None
    for name in ("reasoning", "reasoning_content"):
        text = message.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise InvalidField(f"{at}.{name}", f"'{at}.{name}' must be a string.")
        return text
    return None


def _to_call_id(value: object, role: str, at: str) -> str | None:
    if value is None or role != _TOOL_ROLE:
        return None
    if not isinstance(value, str):
        raise InvalidField(at, f"'{at}' must be a string.")
    return value


def _to_calls(value: object, role: str, at: str) -> tuple[PastCall, ...]:
    if not value:
        return ()
    if role != "assistant" or not isinstance(value, list):
        raise InvalidField(at, f"'{at}' must be a list, and in messages of the assistant only.")
    return tuple(_to_call(item, f"{at}[{index}]") for index, item in enumerate(value))


def _to_call(value: object, at: str) -> PastCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise InvalidField(at, f"'{at}' must be an object with 'id' and 'function'.")
    call_id, name = value.get("id"), function.get("name")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidField(f"{at}.id", f"'{at}.id' must be a string.")
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{at}.function.name", f"'{at}.function.name' must be a non-empty string.")
    arguments = _to_arguments(function.get("arguments"), f"{at}.function.arguments")
    return PastCall.model_construct(
        id=call_id, function=CalledFunction.model_construct(name=name, arguments=arguments)
    )


def _to_arguments(value: object, at: str) -> dict[str, Any]:
    """The object in a string of JSON, or that some clients send as it is.

    What a model wrote that is no object counts as no arguments, as vLLM has it: clients send back whatever
    was written, and a conversation in which a call went wrong, here or elsewhere, has to go on.
    """
    if value is None:
        return {}
    if not isinstance(value, str | dict):
        raise InvalidField(at, f"'{at}' must be a string that holds a JSON object.")
    try:
        arguments = _parsed(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _parsed(text: str) -> object:
    """What the JSON says, half surrogate pairs as "?". Raises ValueError, RecursionError.

    A model may write half a pair, and calls are passed on as they are written: a conversation in which one
    was made has to go on.
    """
    try:
        return strictly_parsed(text.encode())
    except ValueError:
        if _SURROGATE.search(text) is None:
            raise
        return strictly_parsed(_ESCAPE.sub(_whole, text).encode())


# Escapes one after another, so that the second half of `\\` begins none; half a pair is the only group.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


def _whole(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else "?"


def _to_text(value: object, at: str, kinds: Sequence[str]) -> str:
    """kinds: of parts that it may have, which have their text under their type's name."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidField(at, f"'{at}' must be a string or a list of text parts.")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            accepted = " or ".join(f'"{each}"' for each in kinds)
            raise UnsupportedParameter(
                f"{at}[{index}].type",
                f"'{at}[{index}].type' must be {accepted}: other content is not supported.",
            )
        text = part.get(kind) if isinstance(kind, str) and isinstance(part, dict) else None
        if not isinstance(text, str):
            name = kind if isinstance(kind, str) else "text"
            raise InvalidField(
                f"{at}[{index}]",
                f"'{at}[{index}]' must be an object with type \"{name}\" and a string '{name}'.",
            )
        texts.append(text)
    return "".join(texts)


_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": list(_PART_TYPES)},
            **{name: {"type": "string"} for name in _PART_TYPES},
        },
    },
}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": {"anyOf": [{"type": "string"}, _PARTS]},
            "name": {"type": "string"},
            "reasoning_content": {"type": "string"},
            "refusal": {"type": "string"},
        },
    },
}
