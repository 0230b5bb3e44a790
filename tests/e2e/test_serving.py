"""The whole path, through real processes and the `openai` client: proxy, Router, two replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from loadtest import demo
from replica.output.sample_table import people_table
from tests.e2e.deployments import BY_HAPROXY, BY_PYTHON, deployed
from tests.servers import Server

BLOCK = 16


pytestmark = deployed(BY_HAPROXY, BY_PYTHON)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


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


def test_warm_prompt_goes_where_it_is_cached(client: openai.OpenAI) -> None:
    """Both replicas are made warm for something; each later question finds its own replica."""
    prompts = [unique_prompt() for _ in range(6)]
    # By itself the Router might send all to one that has measured itself as faster.
    in_turn = {"x-warmpath-policy": "round_robin"}
    first = [ask(client, prompt, extra_headers=in_turn) for prompt in prompts]
    assert len({replica for _, replica in first}) == 2
    for prompt, (cold, replica) in zip(prompts, first, strict=True):
        warm, where = ask(client, prompt)
        assert cached(cold) == 0
        assert where == replica
        assert cached(warm) == reusable(warm) > 0


def test_one_prompt_ten_times_is_computed_once(client: openai.OpenAI) -> None:
    prompt = unique_prompt()
    answers = [ask(client, prompt) for _ in range(10)]
    assert len({replica for _, replica in answers}) == 1
    assert [cached(answer) for answer, _ in answers] == [0] + [reusable(answers[0][0])] * 9
    assert len({answer.choices[0].message.content for answer, _ in answers}) == 1


def test_ten_twins_at_once_are_computed_on_one_replica(client: openai.OpenAI) -> None:
    """The predicted entries: none of the ten has been cached anywhere when the last is placed."""
    prompt = unique_prompt()  # long: ten twins of a short one may rightly be worth a second copy
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: ask(client, prompt), range(10)))
    assert len({replica for _, replica in answers}) == 1
    assert sorted(cached(answer) for answer, _ in answers)[-9:] == [reusable(answers[0][0])] * 9


def test_another_salt_does_not_hit(client: openai.OpenAI) -> None:
    prompt = unique_prompt()
    salts = ["one", "one", "two", ""]
    answers = [ask(client, prompt, extra_body={"cache_salt": salt} if salt else {})[0] for salt in salts]
    assert [cached(answer) for answer in answers] == [0, reusable(answers[0]), 0, 0]


def test_burst_of_different_prompts_spreads(client: openai.OpenAI) -> None:
    prompts = [unique_prompt(20) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        replicas = [replica for _, replica in pool.map(lambda prompt: ask(client, prompt), prompts)]
    counts = sorted(replicas.count(replica) for replica in set(replicas))
    assert len(counts) == 2
    assert counts[0] >= 4, counts


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


def test_same_seed_same_text_on_either_replica(client: openai.OpenAI) -> None:
    """The draw at (seed, position) is a pure function, whichever replica makes it."""
    prompt = unique_prompt(10)
    texts, replicas = set(), set()
    for _ in range(4):
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=24,
            temperature=1.0,
            seed=7,
            extra_body={"ignore_eos": True},
            extra_headers={"x-warmpath-policy": "round_robin"},
        )
        replicas.add(raw.headers["x-warmpath-replica"])
        texts.add(raw.parse().choices[0].message.content)
    assert len(replicas) == 2
    assert len(texts) == 1


def test_completions_take_text_and_token_ids(client: openai.OpenAI) -> None:
    first = client.completions.create(model="tiny", prompt="The quick brown fox", max_tokens=4, temperature=0)
    assert first.usage is not None
    ids = client.completions.create(model="tiny", prompt=list(range(100, 140)), max_tokens=4, temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 40
    again = client.completions.create(model="tiny", prompt=list(range(100, 140)), max_tokens=4, temperature=0)
    assert cached(again) == 32
    assert again.choices[0].text == ids.choices[0].text


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


def test_demo_shows_what_placing_by_prefix_is_worth(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second question of the prefix-aware arm is warm; round robin's goes to the cold replica."""
    assert demo.main(["--url", server.url, "--rounds", "1", "--questions", "2", "--max-tokens", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [first, second] = [row for row in rows if len(row) == 8]
    _, _, _, robin_cached, robin_replica, _, aware_cached, aware_replica = second
    assert robin_replica != first[4]
    assert robin_cached == "0"
    assert aware_replica == first[7]
    assert int(aware_cached) > 1000


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


def test_replica_killed_mid_stream_continues_with_the_same_text(
    server: Server, client: openai.OpenAI
) -> None:
    """It costs a replica, which Serve replaces."""
    prompt = unique_prompt(10)
    whole, _ = ask(client, prompt, max_tokens=400)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, killed, done = "", False, False
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        replica = answer.headers["x-warmpath-replica"]
        pid = next(each["pid"] for each in server.version()["replicas"] if each["replica_id"] == replica)
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["delta"].get("content") or ""
                if not killed:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
    assert done
    assert text == whole.choices[0].message.content
    server.wait_until_whole()
