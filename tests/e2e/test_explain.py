"""Asking a real server why: the debug route, `python -m router`, the metrics, and the trace it wrote."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import httpx

from loadtest.workloads.recording import read_recording
from tests.e2e.deployments import BY_PYTHON, TOKEN, deployed
from tests.servers import ROOT, Server

BLOCK = 16

pytestmark = deployed(BY_PYTHON)  # and the first to ask it: some of what is told here counts from its start


def complete(server: Server, prompt: list[int], **headers: str) -> str:
    """Answers a prompt of token ids; its id."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def router(server: Server, *arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "WARMPATH_URL": server.url}
    environment.pop("WARMPATH_DEBUG_TOKEN", None)
    if token is not None:
        environment["WARMPATH_DEBUG_TOKEN"] = token
    command = [sys.executable, "-m", "router", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def a_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 900) for _ in range(num_tokens)]


def test_a_request_is_explained_advised_on_and_recorded(server: Server, shared_folder: Path) -> None:
    body = a_prompt(1, 40 * BLOCK)
    cold = complete(server, [*body, 5])
    complete(server, [*body, 5], **{"x-request-id": "mine"})
    for number in range(6):  # a "timestamp" of one block at the top of one document
        complete(server, [*a_prompt(100 + number, BLOCK), *a_prompt(7, 20 * BLOCK), 5])

    told = router(server, "explain", cold)
    assert told.returncode == 0, told.stderr
    assert "Nobody held any of it" in told.stdout
    assert "The engine found 0 tokens in its cache, as expected." in told.stdout
    assert "First token after" in told.stdout
    assert "The shadow policy round_robin would have" in told.stdout

    warm = router(server, "explain", "mine")
    assert warm.returncode == 0, warm.stderr
    assert f"expected to hold {40 * BLOCK} tokens of it (100%)" in warm.stdout
    assert (
        f"The engine found {40 * BLOCK} tokens in its cache, as expected. It computed 1 token" in warm.stdout
    )

    assert "mine-" in router(server, "explain", "--last", "30").stdout

    advice = router(server, "advise")
    assert advice.returncode == 0, advice.stderr
    assert "1. Move what changes at the top of the prompt behind what stays" in advice.stdout
    assert "part in block 0" in advice.stdout

    assert server.metric("warmpath_uncached_tokens_total") == (
        server.metric("warmpath_prompt_tokens_total")
        - sample(server, 'warmpath_hit_tokens_total{stage="delivered"}')
    )
    assert sample(server, 'warmpath_uncached_tokens_total{reason="diverged"}') == 5 * 20 * BLOCK
    assert server.metric("warmpath_match_within_one_block_ratio") == 1.0
    assert server.metric("warmpath_shadow_decisions_total") == 8

    [trace] = shared_folder.glob("traffic-*.jsonl")
    requests = read_recording(trace).requests
    assert len(requests) == 8
    assert requests[0].block_ids[:40] == requests[1].block_ids[:40]
    assert {request.output_tokens for request in requests} == {4}
    assert [request.input_tokens for request in requests[:2]] == [40 * BLOCK + 1] * 2


def test_what_cannot_be_asked_says_why(server: Server) -> None:
    without = router(server, "advise", token=None)
    assert (without.returncode, "WARMPATH_DEBUG_TOKEN" in without.stderr) == (1, True)
    unknown = router(server, "explain", "chatcmpl-never")
    assert (unknown.returncode, "is not remembered (1 Router asked)" in unknown.stderr) == (1, True)
    nobody = router(server, "advise", "--url", "http://127.0.0.1:9")
    assert (nobody.returncode, "make serve" in nobody.stderr) == (1, True)


def sample(server: Server, series: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    begin = series.removesuffix("}") + ","  # the Router's label comes last
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(begin))
