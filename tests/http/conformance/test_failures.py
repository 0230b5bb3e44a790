"""Failures: one error object on every path, and the status each has."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cache.errors import QueueFull
from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.tenants.settings import TenantSettings
from tests.conformance.asking import assert_error, chat, client_of, complete, metric, raw_post, wait_for
from tests.conformance.rows import row
from tests.fakes.http import RouterUnderTest, counting
from tests.fakes.keys import entry, key_file
from tests.http_server import MODEL, HttpServer, scripted_server


@row("one error object on every path")
@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nope", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("GET", "/v1/models/nope", b"", 404),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"{}", 400),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", b"nonsense", 400),
    ],
)
def test_every_error_has_the_one_shape(
    server: HttpServer, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, server.url + path, content=content, timeout=10)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert_error(answer.json(), param=error["param"], code=error["code"])


@row("400 malformed JSON, deep nesting, bad UTF-8")
@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"model": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 1000],
)
def test_what_is_not_json_is_a_400(server: HttpServer, content: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, timeout=10)
    assert answer.status_code == 400
    assert_error(answer.json(), param=None, code="malformed_json")


@row("404 unknown model")
@pytest.mark.parametrize("ask", [chat, complete])
def test_an_unknown_model(client: openai.OpenAI, ask: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-9")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@row("401 bad key")
def test_a_bad_key_is_a_401(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys.yaml", tmp_path / "secret"
    keys.write_text(key_file(entry("mine", "the right key")))
    secret.write_text("0123456789abcdef" * 2)
    tenants = TenantSettings(keys_file=str(keys), secret_file=str(secret))
    with scripted_server(RouterUnderTest(tenants=tenants)) as server:
        with client_of(server, api_key="another key") as stranger:
            with pytest.raises(openai.AuthenticationError) as caught:
                complete(stranger)
            assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        with client_of(server, api_key="the right key") as known:
            assert complete(known).choices[0].text


@row("413 body too large")
def test_a_body_above_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, "x" * (5 << 20))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


@row("429 and 503 with Retry-After")
def test_busy_is_a_429_that_the_client_retries() -> None:
    asked: list[ReplicaId] = []

    async def busy_at_first(request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        asked.append(replica)
        if len(asked) <= 2:  # both replicas
            raise QueueFull(1, 1)
        async for delta in counting(request, replica):
            yield delta

    router = RouterUnderTest()
    router.follow(busy_at_first)
    with scripted_server(router) as server:
        with client_of(server) as impatient, pytest.raises(openai.RateLimitError) as caught:
            complete(impatient)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "server_busy"
        asked.clear()
        with client_of(server, max_retries=1) as patient:
            assert complete(patient).choices[0].text
        assert len(asked) == 3


@row("429 and 503 with Retry-After")
def test_no_replica_is_a_503() -> None:
    router = RouterUnderTest(num_replicas=0)
    with scripted_server(router) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
        assert (caught.value.status_code, caught.value.code) == (503, "no_replica")
        assert caught.value.response.headers["retry-after"] == "1"


@row("504 deadline")
def test_a_deadline_that_has_passed_is_a_504() -> None:
    """Passed before a replica was asked: the engine never hears of it, nor does the server twice."""
    with scripted_server(RouterUnderTest(request_timeout_s=1e-9)) as server:
        with client_of(server, max_retries=2) as client, pytest.raises(openai.InternalServerError) as caught:
            complete(client)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert metric(server, "warmpath_requests_total") == 1


@row("499 client gone")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(server: HttpServer, stream: bool) -> None:
    """Its connection is closed during a long answer; the engine is idle soon after."""
    before = metric(server, "warmpath_requests_total")
    body = {"model": MODEL, "prompt": "The sea", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    with socket.create_connection(("127.0.0.1", server.port), 10) as link:
        link.sendall(raw_post("/v1/completions", json.dumps(body).encode()))
        wait_for(lambda: metric(server, "warmpath_requests_in_flight") == 1)
        if stream:
            assert link.recv(1)
    wait_for(lambda: metric(server, "warmpath_requests_in_flight") == 0)
    wait_for(lambda: metric(server, "warmpath_requests_total") == before + 1)
    wait_for(lambda: num_running(server) == 0)


def num_running(server: HttpServer) -> int:
    replicas = httpx.get(f"{server.url}/version", timeout=10).json()["replicas"]
    return sum(int(replica["num_running"]) for replica in replicas)
