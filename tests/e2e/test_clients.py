"""Clients as they are, against the deployed server: proxy, Router, two replicas.

`openai` is a development dependency; `litellm`, `guidellm` and `aiperf` have environments of their own, made
by `make clients`. A client that is not installed is skipped, unless WARMPATH_CLIENTS names it: then it must
be there.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from replica.models import tiny_model
from tests.e2e.deployments import USUAL, deployed
from tests.servers import ROOT, Server

ENVIRONMENTS = ROOT / ".clients"
pytestmark = deployed(USUAL)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as made:
        yield made


def binary(name: str, program: str) -> str:
    """A program of a client's own environment. Skips where it is not installed and not asked for."""
    path = ENVIRONMENTS / name / "bin" / program
    if not path.exists():
        assert name not in os.environ.get("WARMPATH_CLIENTS", "").split(), f"{path} is not there"
        pytest.skip(f"{name} is not installed: make clients")
    return str(path)


def run(*command: str, folder: Path, **environment: str) -> str:
    """Runs a client to its end; what it printed. Fails unless it succeeds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def requests_ok(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    wanted = 'warmpath_requests_total{endpoint="chat/completions",outcome="ok",'
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(wanted))


# --- openai -----------------------------------------------------------------------------------------


def test_openai_streams_what_it_gets_whole(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me of the sea."}]}],
        "max_completion_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**options)
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options=usage))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 24


def test_a_batch_of_64_prompts_is_64_decisions(server: Server, client: openai.OpenAI) -> None:
    """Many handle calls under one HTTP request, which Serve would take for one and hang."""
    before = server.metric("warmpath_decisions_total")
    prompts = [f"{uuid.uuid4()}" for _ in range(64)]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(64))
    assert server.metric("warmpath_decisions_total") == before + 64


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_id_comes_back_once(server: Server, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "The sea", "max_tokens": 2, "stream": stream}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"x-request-id": "mine-9"}, timeout=30
    )
    assert answer.headers.get_list("x-request-id") == ["mine-9"]
    assert "cmpl-mine-9-" in answer.text


@pytest.mark.parametrize("given", [b'a b"c', "ü".encode(), b"\xfc", b"x" * 200])
def test_a_request_id_that_is_replaced_is_told(server: Server, given: bytes) -> None:
    """Serve sends back what a client sent, whatever its request is called."""
    body = {"model": "tiny", "prompt": "The sea", "max_tokens": 2}
    headers = [(b"x-request-id", given)]
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
    [told] = answer.headers.get_list("x-request-id")
    assert re.fullmatch("[0-9a-f]{32}", told)
    assert answer.json()["id"].startswith(f"cmpl-{told}-")


def test_tokenize_counts_as_the_engine_does(server: Server, client: openai.OpenAI) -> None:
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "The sea is wide."}, timeout=30).json()
    answer = client.completions.create(model="tiny", prompt="The sea is wide.", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens["count"]
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}, timeout=30).json()
    assert back == {"prompt": "The sea is wide."}


def test_every_error_of_ours_has_the_one_shape_through_the_proxy(server: Server) -> None:
    for method, path, content, status in (
        ("GET", "/nope", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b'{"model": "other", "prompt": "x"}', 404),
        ("POST", "/v1/completions", b" " * (5 << 20), 413),
    ):
        answer = httpx.request(method, server.url + path, content=content, timeout=30)
        assert answer.status_code == status, answer.text[:300]
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\nx-large: " + b"x" * (2 << 20) + b"\r\n\r\n",
    ],
    ids=["no HTTP", "no length", "2 MB of headers"],
)
def test_protocol_errors_are_the_proxys_and_have_a_status(server: Server, content: bytes) -> None:
    """Its own page, or a cut connection; and the next request is fine."""
    port = int(server.url.rsplit(":", 1)[1])
    received = b""
    with socket.create_connection(("127.0.0.1", port), 30) as link:
        try:
            link.sendall(content)
            received = link.recv(65536)
        except ConnectionError:
            pass
    assert not received or received.split(b" ", 2)[1] in (b"400", b"413", b"431"), received[:200]
    assert httpx.get(f"{server.url}/live", timeout=10).status_code == 200


# --- clients with environments of their own ---------------------------------------------------------


def test_litellm(server: Server, tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "clients" / "use_litellm.py")
    found = json.loads(run(binary("litellm", "python"), script, server.url, "tiny", folder=tmp_path))
    for provider in ("openai", "hosted_vllm"):
        answer = found[provider]
        assert answer["content"]
        assert answer["streamed"] == answer["content"]
        assert answer["stream_finish_reasons"] == [answer["finish_reason"]]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert found["several"] == [found["openai"]["content"]] * 2  # greedy: the same twice
    assert "'frequency_penalty'" in found["refused"]


def test_guidellm(server: Server, tmp_path: Path) -> None:
    before = requests_ok(server)
    run(
        *(binary("guidellm", "guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={server.url},model=tiny"),
        *("--tokenizer", f"kind=hf_auto,model={tiny_model.ensure_built()}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=10"),
        *("--output", "kind=json,path=out.json"),
        folder=tmp_path,
        HF_HUB_OFFLINE="1",
    )
    report = json.loads((tmp_path / "out.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (10, 0)
    assert requests_ok(server) >= before + 10


def test_aiperf(server: Server, tmp_path: Path) -> None:
    before = requests_ok(server)
    run(
        *(binary("aiperf", "aiperf"), "profile", "--ui", "none", "--artifact-dir", "out"),
        *("--model", "tiny", "--url", server.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(tiny_model.ensure_built()), "--isl", "64", "--osl", "8"),
        *("--concurrency", "2", "--request-count", "10"),
        folder=tmp_path,
    )
    (export,) = tmp_path.glob("out/**/profile_export_aiperf.json")
    summary = json.loads(export.read_text())
    assert summary["request_count"]["avg"] == 10
    assert requests_ok(server) >= before + 10
