"""The whole path, through real processes and the `openai` client, behind either proxy."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from replica.output.sample_table import people_table
from tests.e2e.asking import ask, reusable, unique_prompt
from tests.e2e.deployments import BY_HAPROXY, BY_PYTHON, deployed
from tests.servers import Server

pytestmark = deployed(BY_HAPROXY, BY_PYTHON)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


def test_ready_text_says_what_runs_and_how_to_ask(server: Server) -> None:
    text = server.log.read_text()
    for part in (
        f"{server.url}/v1",
        "nonsense",
        "model: <local dir or hub id>",
        "gather_sdpa",
        "1024 blocks of 16",
    ):
        assert part in text
    command = text[text.index("curl ") : text.index("\nCtrl-C")]
    answer = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert answer.rstrip().endswith("data: [DONE]")


def test_streaming_equals_not_streaming(client: openai.OpenAI) -> None:
    prompt = unique_prompt(10)
    whole, _ = ask(client, prompt, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == reusable(whole)


def test_models_and_health(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 200
    assert len(server.version()["replicas"]) == 2
    assert "warmpath_" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        ({"messages": "hi"}, 400, "messages"),
        ({"model": "gpt-9", "messages": [{"role": "user", "content": "hi"}]}, 404, "model"),
        ({"messages": [{"role": "user", "content": "hi"}], "temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "hi"}], "n": 0}, 400, "n"),
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, 400, "messages"),
    ],
)
def test_bad_input_is_refused_with_the_field_named(
    server: Server, body: bytes | dict[str, Any], status: int, param: str | None
) -> None:
    content = (
        body if isinstance(body, bytes) else json.dumps({"model": "tiny", "max_tokens": 4, **body}).encode()
    )
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
        timeout=30,
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


def test_too_long_a_prompt_names_both_numbers(server: Server) -> None:
    limit = server.version()["replicas"][0]["max_model_len"]
    body = {"model": "tiny", "prompt": [5] * (limit + 10), "max_tokens": 4}
    message = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["error"]["message"]
    assert str(limit + 10) in message
    assert str(limit) in message


def test_disconnect_stops_the_generation(server: Server) -> None:
    """Long answers whose clients leave after the first token do not hold their blocks."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": people_table()}],
        "max_tokens": 8000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    for _ in range(2):
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
    deadline = time.monotonic() + 10
    while server.metric("warmpath_requests_in_flight") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("warmpath_requests_in_flight") == 0
    running = [replica["num_running"] for replica in server.version()["replicas"]]
    deadline = time.monotonic() + 10
    while any(running) and time.monotonic() < deadline:
        time.sleep(0.1)
        running = [replica["num_running"] for replica in server.version()["replicas"]]
    assert running == [0, 0]


def test_answers_come_over_the_routers_own_connections(server: Server, client: openai.OpenAI) -> None:
    """Falling back to Ray's calls would only be seen in CPU time."""
    for _ in range(2):
        ask(client, unique_prompt(5))
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    told = re.findall(
        r"^warmpath_(delta_streams_total|replica_delta_channel){(.*?)} (.*)$", text, re.MULTILINE
    )
    streams = {
        labels.partition('"')[2].partition('"')[0]: float(n) for name, labels, n in told if "str" in name
    }
    assert streams["channel"] >= 2
    assert streams["call"] == 0
    assert [float(number) for name, _, number in told if name == "replica_delta_channel"] == [1, 1]


def test_streams_reach_the_python_proxy_over_a_connection(
    server: Server, client: openai.OpenAI, request: pytest.FixtureRequest
) -> None:
    """Falling back to Serve's calls would only be seen in CPU time. HAProxy is written to by the Router."""
    by_channel, by_call = body_streams(server)
    for _ in range(3):
        pieces = client.completions.create(model="tiny", prompt=unique_prompt(), max_tokens=20, stream=True)
        assert [piece.choices[0].finish_reason for piece in pieces][-1] is not None
    is_python = "python" in request.node.callspec.id
    assert body_streams(server) == (by_channel + 3 * is_python, by_call)


def body_streams(server: Server) -> tuple[float, float]:
    """By channel, and by call."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    series = r'^warmpath_body_streams_total{.*way="(channel|call)".*} (\S+)$'
    told = {way: float(number) for way, number in re.findall(series, text, re.MULTILINE)}
    return told["channel"], told["call"]
