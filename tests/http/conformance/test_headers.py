"""Headers that are sent, taken and given back."""

from __future__ import annotations

import openai
import pytest

from tests.conformance.asking import chat, client_of, complete, unique
from tests.conformance.rows import row
from tests.fakes.http import RouterUnderTest
from tests.http_server import MODEL, scripted_server


@row("x-request-id in and out")
def test_the_request_id_comes_back(client: openai.OpenAI) -> None:
    answer = chat(client, extra_headers={"x-request-id": "mine-7"})
    assert answer._request_id == "mine-7"
    assert answer.id.startswith("chatcmpl-mine-7-")
    assert chat(client)._request_id  # one is made where none was sent
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, n=0, extra_headers={"x-request-id": "mine-8"})
    assert caught.value.request_id == "mine-8"


@row("session header")
def test_a_session_is_kept_in_one_place() -> None:
    headers = [{"x-session-id": "s"}, {"x-session-affinity": "s"}, {}]
    spread = []
    for header in headers:
        router = RouterUnderTest(num_replicas=8, policy="session_affinity")
        with scripted_server(router) as server, client_of(server) as client:
            for prompt in ("one", "two", "three", "four"):
                complete(client, prompt, extra_headers=header)
        spread.append(len({replica for replica, _ in router.calls.requests}))
    assert spread[:2] == [1, 1]
    assert spread[2] > 1


@row("routing headers behind a switch")
def test_routing_headers(client: openai.OpenAI) -> None:
    prompt = unique()
    raw = [
        client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=2)
        for _ in range(2)
    ]
    assert raw[0].headers["x-warmpath-replica"] == raw[1].headers["x-warmpath-replica"]
    assert raw[0].headers["x-warmpath-cached-tokens"] == "0"
    assert int(raw[1].headers["x-warmpath-cached-tokens"]) > 0
    with scripted_server(RouterUnderTest()) as closed, client_of(closed) as other:
        quiet = other.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=2)
    assert not [name for name in quiet.headers if name.startswith("x-warmpath-")]
