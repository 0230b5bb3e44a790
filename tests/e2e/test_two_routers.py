"""Two Routers over two replicas, in real processes: whichever answers, it knows where a prompt is cached."""

from __future__ import annotations

import functools
import time
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


def ask(server: Server, prompt: str, max_tokens: int = 4) -> tuple[str, int, int]:
    """(replica, prompt tokens, cached tokens). A connection of its own, so that the proxy chooses anew."""
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
        },
        timeout=60,
    )
    usage = answer.raise_for_status().json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-warmpath-replica"], usage["prompt_tokens"], cached


def series(server: Server, start: str) -> dict[str, float]:
    """Those whose name and labels begin so."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith(start)]
    return {name: float(value) for name, value in found}


def placed_by_router(server: Server) -> dict[str, float]:
    """Prompt tokens that each Router has placed so far, those that are gone included."""
    return series(server, "warmpath_prompt_tokens_total{")


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


def test_a_hot_prefix_is_copied_for_nobody_in_particular(server: Server) -> None:
    """Asked for again and again, and then by many at a time, each with a question of some length.

    Those wait for one another where it is held, at some time longer than a part of a copy takes and shorter
    than all of it: a request that has the prefix sooner by computing it does so itself. A short question is
    computed before the next has been tokenized, and waits for nobody. Nor is anything copied for half a
    minute after a replica has left, as in the modules before this one.
    """
    made = 'warmpath_hot_copies_total{outcome="made"'
    before, give_up_at = sum(series(server, made).values()), time.monotonic() + 120
    while sum(series(server, made).values()) <= before:
        assert time.monotonic() < give_up_at, "none was ever copied"
        prefix = f"{uuid.uuid4()} " * 60  # a new one: of the last each replica may have a copy by now
        for _ in range(24):
            ask(server, f"{prefix}{uuid.uuid4()}")
        prompts = [prefix + " ".join(str(uuid.uuid4()) for _ in range(12)) for _ in range(24)]
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(functools.partial(ask, server), prompts))
    assert sum(series(server, "warmpath_hot_copy_tokens_total{").values()) > 0
    assert not sum(series(server, 'warmpath_hot_copies_total{outcome="failed"').values())
