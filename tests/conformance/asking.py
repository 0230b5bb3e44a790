"""What the conformance tests ask, in one line each, and what they look at in the answers."""

from __future__ import annotations

import time
import uuid
from typing import Any

import httpx
import openai
import pytest

from tests.http_server import MODEL, HttpServer

BLOCK = 16
MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea, please."}]


def client_of(server: HttpServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", timeout=60, **{"api_key": "none", "max_retries": 0, **options}
    )


def chat(client: openai.OpenAI, content: Any = None, **fields: Any) -> Any:
    """A greedy chat of up to 8 tokens."""
    messages = MESSAGES if content is None else [{"role": "user", "content": content}]
    defaults = {"model": MODEL, "messages": messages, "temperature": 0}
    if "max_completion_tokens" not in fields:
        defaults["max_tokens"] = 8
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return client.chat.completions.create(**{**defaults, **fields}, extra_body=extra)


def complete(client: openai.OpenAI, prompt: Any = "The sea", **fields: Any) -> Any:
    """A greedy completion of 8 tokens."""
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    defaults = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    return client.completions.create(prompt=prompt, **{**defaults, **fields}, extra_body=extra)


def unique(words: int = 40) -> str:
    return f"{uuid.uuid4()} " * words


def cached(answer: Any) -> int:
    count = answer.usage.prompt_tokens_details.cached_tokens
    assert isinstance(count, int)
    return count


def metric(server: HttpServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{"))]
    assert values, f"no metric {name}"
    return sum(values)


def assert_error(body: Any, *, param: str | None, code: str) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)


def assert_refused(ask: Any, client: openai.OpenAI, param: str, value: Any) -> None:
    """400 `unsupported_parameter` naming the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={param: value})
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def raw_post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def wait_for(condition: Any, limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
