"""The routes there are, and those there are not."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.conformance.asking import BLOCK, MESSAGES, chat, complete, metric
from tests.conformance.rows import row
from tests.http_server import MODEL, HttpServer


@row("POST /v1/completions", "prompt: a string")
def test_completions(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@row("POST /v1/chat/completions")
def test_chat_completions(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


@row("GET /v1/models and /v1/models/{id}, with max_model_len")
def test_models(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    card = client.models.retrieve(MODEL)
    assert listed.id == card.id == MODEL
    assert card.model_dump()["max_model_len"] == 512 * BLOCK
    assert card.model_dump()["root"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@row("GET /health and /live")
def test_health(server: HttpServer) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ready", "replicas": 2}
    assert httpx.get(f"{server.url}/live").status_code == 200


@row("GET /metrics on the serving port")
def test_metrics(server: HttpServer, client: openai.OpenAI) -> None:
    before = metric(server, "warmpath_requests_total")
    complete(client)
    assert metric(server, "warmpath_requests_total") == before + 1


@row("GET /version")
def test_version(server: HttpServer) -> None:
    version = httpx.get(f"{server.url}/version").json()
    assert {"version", "revision", "fingerprint"} <= set(version)
    assert len(version["replicas"]) == 2


@row("POST /tokenize and /detokenize")
def test_tokenize(server: HttpServer, client: openai.OpenAI) -> None:
    """The ids are those the model is given: a completion of them has the same prompt and the same text."""
    text = "The sea is grüßend 🌊."
    tokenized = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 512 * BLOCK
    by_text, by_ids = complete(client, text), complete(client, tokenized["tokens"])
    assert by_text.usage.prompt_tokens == by_ids.usage.prompt_tokens == tokenized["count"]
    assert by_text.choices[0].text == by_ids.choices[0].text
    back = httpx.post(f"{server.url}/detokenize", json={"model": MODEL, "tokens": tokenized["tokens"]})
    assert back.json() == {"prompt": text}


@row("POST /tokenize and /detokenize")
def test_a_chat_is_counted_before_it_is_sent(server: HttpServer, client: openai.OpenAI) -> None:
    """Its tools included."""
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    for more in {}, {"tools": tools}:
        body = {"model": MODEL, "messages": MESSAGES, **more}
        counted = httpx.post(f"{server.url}/tokenize", json=body).json()["count"]
        answer = chat(client, **{name: body[name] for name in more})
        assert answer.usage.prompt_tokens == counted


@row("POST /tokenize and /detokenize")
def test_special_tokens_are_left_out_of_both_alike(server: HttpServer, client: openai.OpenAI) -> None:
    body = {"prompt": "The sea", "add_special_tokens": False}
    counted = httpx.post(f"{server.url}/tokenize", json=body).json()["count"]
    answer = complete(client, "The sea", extra_body={"add_special_tokens": False})
    assert answer.usage.prompt_tokens == counted


@row("/v1/embeddings and other routes: 404, not 500")
def test_routes_that_are_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unknown_url"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="x")


@row("/openapi.json")
def test_openapi(server: HttpServer) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(paths)
