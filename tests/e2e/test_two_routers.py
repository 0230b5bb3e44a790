"""Two Routers over two replicas, in real processes: whichever answers, it knows where a prompt is cached."""

from __future__ import annotations

import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.deployments import WITH_TWO_ROUTERS, deployed
from tests.servers import Server

BLOCK = 16
NUM_PROMPTS = 12
NUM_REPEATS = 4

# The default suite has `test_several_routers.py`.
pytestmark = [pytest.mark.long, deployed(WITH_TWO_ROUTERS)]


def ask(server: Server, prompt: str) -> tuple[str, int, int]:
    """(replica, prompt tokens, cached tokens). A connection of its own, so that the proxy chooses anew."""
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 4,
            "temperature": 0,
        },
        timeout=60,
    )
    usage = answer.raise_for_status().json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-warmpath-replica"], usage["prompt_tokens"], cached


def placed_by_router(server: Server) -> dict[str, float]:
    """Prompt tokens that each Router has placed so far, those that are gone included."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    placed = [line.rsplit(" ", 1) for line in lines if line.startswith("warmpath_prompt_tokens_total{")]
    return {router: float(tokens) for router, tokens in placed}


def test_each_router_knows_what_the_other_has_placed(server: Server) -> None:
    before = placed_by_router(server)
    prompts = [f"{uuid.uuid4()} " * 30 for _ in range(NUM_PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda prompt: ask(server, prompt), prompts))
    assert max(Counter(replica for replica, _, _ in first).values()) < NUM_PROMPTS
    for _ in range(NUM_REPEATS):
        for prompt, (replica, prompt_tokens, cached) in zip(prompts, first, strict=True):
            assert cached == 0
            again = ask(server, prompt)
            assert again == (replica, prompt_tokens, (prompt_tokens - 1) // BLOCK * BLOCK)
    placed = placed_by_router(server)
    grown = [router for router, tokens in placed.items() if tokens > before.get(router, 0.0)]
    assert len(grown) == 2  # it was not one of them all the time
