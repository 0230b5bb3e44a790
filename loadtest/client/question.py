"""What is asked: one body for `/v1/chat/completions` or `/v1/completions`, always streamed, with usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Message(TypedDict):
    role: str  # "system" | "user" | "assistant"
    content: str


@dataclass(frozen=True, slots=True)
class Question:
    """One request, but for the model's name, which the endpoint knows."""

    path: str
    body: Mapping[str, Any]
    num_choices: int = 1
    session: str | None = None  # sent as x-session-id: what policies with sessions go by
    headers: Mapping[str, str] = field(default_factory=dict)

    def with_choices(self, count: int) -> Question:
        return replace(self, body={**self.body, "n": count}, num_choices=count)


def chat(
    messages: Sequence[Message], *, max_tokens: int, session: str | None = None, **more: Any
) -> Question:
    """more: further fields of the body, such as temperature or seed."""
    return Question(CHAT, _body(max_tokens, messages=list(messages), **more), session=session)


def completion(
    prompt: str | Sequence[int], *, max_tokens: int, session: str | None = None, **more: Any
) -> Question:
    """prompt: text, or token ids of the served model."""
    return Question(COMPLETIONS, _body(max_tokens, prompt=prompt, **more), session=session)


def _body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        **fields,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
