"""A chat as a client sent it, before a template renders it: messages, tools, the template's own variables.

Knows the shape of OpenAI's messages; knows neither tokenizers nor templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.errors import InvalidField

Message = Mapping[str, Any]
MESSAGE_CHARS = 64  # what a template writes around each, about
PART_CHARS = 4  # of JSON around a key or value, or for one that is no text; about


@dataclass(frozen=True, slots=True)
class Chat:
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    assistant_is_next: bool = (
        True  # it is rendered up to where the assistant speaks; else up to the last message
    )

    def flattened(self) -> list[dict[str, Any]]:
        """The messages with content given as a list of text parts put together. Raises InvalidField."""
        return [_flattened(message, index) for index, message in enumerate(self.messages)]

    def num_chars(self, enough: int) -> int:
        """About how many it has when it is rendered; what is no text is counted up to `enough`."""
        size = sum([_content_size(message, enough) + MESSAGE_CHARS for message in self.messages])
        size += json_chars(self.tools, enough) if self.tools else 0
        return size + json_chars(self.template_kwargs, enough)


def _flattened(message: Message, index: int) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    at = f"messages[{index}].content"
    if not isinstance(content, Sequence):
        raise InvalidField(at, f"{at!r} must be a string or a list of text parts.")
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidField(f"{at}[{number}]", f"'{at}[{number}]' must be a text part.")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _content_size(message: Message, enough: int) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    size = json_chars(calls, enough) if calls else 0
    for name in ("name", "reasoning"):
        size += len(message[name]) if isinstance(message.get(name), str) else 0
    if isinstance(content, Sequence) and not isinstance(content, str):
        return size + sum(len(str(part)) for part in content)
    return size + (len(content) if isinstance(content, str) else 0)


def json_chars(value: object, enough: int) -> int:
    """About how many characters it has as JSON. Looks at no more parts than `enough` characters can be of."""
    size, waiting = 0, [value]
    while waiting and size <= enough:
        part = waiting.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += PART_CHARS * 2 * len(part)
            if size <= enough:
                waiting += part
                waiting += part.values()
        elif isinstance(part, list | tuple):
            size += PART_CHARS * len(part)
            if size <= enough:
                waiting += part
    return size
