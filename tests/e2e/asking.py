"""What tests of deployments ask, in one line each, and what they look at in the answers."""

from __future__ import annotations

import uuid
from typing import Any

import openai

BLOCK = 16


def ask(client: openai.OpenAI, content: str, **options: Any) -> tuple[Any, str]:
    """One greedy answer and the replica that gave it."""
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=options.pop("max_tokens", 8),
        temperature=0,
        extra_body=extra,
        **options,
    )
    return raw.parse(), raw.headers["x-warmpath-replica"]


def cached(answer: Any) -> int:
    count = answer.usage.prompt_tokens_details.cached_tokens
    assert isinstance(count, int)
    return count


def unique_prompt(words: int = 60) -> str:
    return f"{uuid.uuid4()} " * words


def reusable(answer: Any) -> int:
    """Tokens a repeat of this prompt finds cached: full blocks, at least one token left to compute."""
    return (answer.usage.prompt_tokens - 1) // BLOCK * BLOCK
