"""The cache, as clients see it: cached tokens, and what keeps prompts apart."""

from __future__ import annotations

import openai
import pytest

from tests.conformance.asking import BLOCK, cached, chat, unique
from tests.conformance.rows import row


@row("usage.prompt_tokens_details.cached_tokens")
@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_there_cold_and_warm(client: openai.OpenAI, stream: bool) -> None:
    prompt = unique()
    counts = []
    for _ in range(2):
        if stream:
            *_, last = chat(client, prompt, stream=True, stream_options={"include_usage": True})
        else:
            last = chat(client, prompt)
        counts.append((cached(last), last.usage.prompt_tokens))
    (cold, size), (warm, _) = counts
    assert cold == 0
    assert warm == (size - 1) // BLOCK * BLOCK > 0


@row("cache_salt")
def test_another_salt_does_not_hit(client: openai.OpenAI) -> None:
    prompt = unique()
    salts = [None, None, "one", "two", "one"]
    counts = [cached(chat(client, prompt, extra_body={"cache_salt": salt})) for salt in salts]
    assert counts[0] == counts[2] == counts[3] == 0
    assert counts[1] == counts[4] > 0


@row("prompt_cache_key is a hint")
def test_the_cache_key_separates_nothing(client: openai.OpenAI) -> None:
    prompt = unique()
    counts = [cached(chat(client, prompt, prompt_cache_key=key)) for key in ("one", "two")]
    assert counts[0] == 0 < counts[1]
