"""Every form of a prompt, alone and in batches."""

from __future__ import annotations

import openai

from tests.conformance.asking import chat, complete, metric, unique
from tests.conformance.rows import row
from tests.http_server import HttpServer


@row("prompt: token ids")
def test_a_prompt_of_token_ids(client: openai.OpenAI) -> None:
    assert complete(client, list(range(100, 140))).usage.prompt_tokens == 40


@row("prompt: a list of strings")
def test_a_batch_of_strings(client: openai.OpenAI) -> None:
    prompts = [f"Prompt number {index}" for index in range(8)]
    batch = complete(client, prompts)
    assert [choice.index for choice in batch.choices] == list(range(8))
    alone = [complete(client, prompt) for prompt in prompts]
    assert [choice.text for choice in batch.choices] == [answer.choices[0].text for answer in alone]
    assert batch.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert batch.usage.completion_tokens == 64


@row("prompt: a list of strings")
def test_a_batch_of_64_prompts_is_64_decisions(server: HttpServer, client: openai.OpenAI) -> None:
    before = metric(server, "warmpath_decisions_total")
    answer = complete(client, [unique(2) for _ in range(64)], max_tokens=2)
    assert len(answer.choices) == 64
    assert metric(server, "warmpath_decisions_total") == before + 64


@row("prompt: a list of lists of token ids")
def test_a_batch_of_token_ids(client: openai.OpenAI) -> None:
    batch = complete(client, [[100, 101, 102], [103, 104]])
    assert batch.usage.prompt_tokens == 5
    alone = [complete(client, ids).choices[0].text for ids in ([100, 101, 102], [103, 104])]
    assert [choice.text for choice in batch.choices] == alone


@row("content as a list of text parts")
def test_content_parts_are_their_concatenation(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of the sea."}]
    by_parts, whole = chat(client, parts), chat(client, "Tell me of the sea.")
    assert by_parts.usage.prompt_tokens == whole.usage.prompt_tokens
    assert by_parts.choices[0].message.content == whole.choices[0].message.content
