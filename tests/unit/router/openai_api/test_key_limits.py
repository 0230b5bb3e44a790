"""A key's limits over HTTP: what is refused beyond them, what gives a place back, and what is charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache.errors import DeadlineExceeded, QueueFull
from cache.events import Load, RequestEnded
from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from tests.fakes.guarded import PROMPT, ask, code_of, key, settings, tokenize_slowly
from tests.fakes.http import MODEL, RouterUnderTest, asgi_call


async def test_a_used_up_key_is_told_when_to_come_back(guarded: RouterUnderTest) -> None:
    answers = [await ask(guarded, "limited") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert left == ["1", "0", "0"]
    refused = answers[-1]
    assert code_of(refused) == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    used = 2 * (len(PROMPT) + 4)  # two prompts and their answers; what came back since is not known
    assert 10_000 - used <= int(refused.headers["x-ratelimit-remaining-tokens"]) <= 10_000
    assert (await ask(guarded, "bob")).status_code == 200


async def test_what_computes_nothing_is_not_limited(guarded: RouterUnderTest) -> None:
    for _ in range(5):
        assert (await guarded.client.get("/v1/models", headers=key("limited"))).status_code == 200


async def test_one_at_a_time_is_from_the_header_to_the_streams_end(guarded: RouterUnderTest) -> None:
    release = asyncio.Event()

    async def waiting(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        yield Delta("a", (1,), 0)
        await release.wait()
        yield Delta("b", (2,), 0, FinishReason.LENGTH)

    guarded.calls.scripts = dict.fromkeys(guarded.replicas, waiting)
    first = asyncio.create_task(ask(guarded, "single", stream=True))
    async with asyncio.timeout(20):
        while not guarded.calls.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
    refused = await ask(guarded, "single")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    release.set()
    assert (await first).status_code == 200
    assert (await ask(guarded, "single")).status_code == 200
    batch = await ask(guarded, "single", prompt=["a", "b"])
    assert (batch.status_code, code_of(batch)) == (400, "invalid_value")
    assert (await ask(guarded, "single")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_gives_its_place_back(guarded: RouterUnderTest, stream: bool) -> None:
    async def endless(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        while True:
            yield Delta("a", (1,), 0)
            await asyncio.sleep(0.001)

    guarded.calls.scripts = dict.fromkeys(guarded.replicas, endless)
    asking = asyncio.create_task(ask(guarded, "single", stream=stream))
    async with asyncio.timeout(20):
        while not guarded.calls.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    guarded.calls.scripts = {}
    assert (await ask(guarded, "single")).status_code == 200


async def test_a_prompt_that_nobody_took_is_not_charged(guarded: RouterUnderTest) -> None:
    async def busy(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        raise QueueFull(1, 1)
        yield

    guarded.calls.scripts = dict.fromkeys(guarded.replicas, busy)
    for _ in range(3):
        refused = await ask(guarded, "thrifty", "x" * 30)
        assert (refused.status_code, code_of(refused)) == (429, "server_busy")
    guarded.calls.scripts = {}
    assert (await ask(guarded, "thrifty", "x" * 30)).status_code == 200
    refused = await ask(guarded, "thrifty", "x" * 30)
    assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-limit-tokens"] == "40"


@pytest.mark.parametrize("has_left", [False, True])
async def test_what_was_computed_for_a_client_that_does_not_read_is_charged_once(
    guarded: RouterUnderTest, has_left: bool
) -> None:
    """Only what was read was: a key with a limit could have any number of tokens computed."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 80, "stream": True}
    disconnect = asyncio.Event()
    guarded.answer_with(Delta("a", (1,), 0), Delta("b", (2,) * 70, 0), then_hang=True)
    call = asyncio.create_task(
        asgi_call(guarded.api, "/v1/completions", body, disconnect, reads=False, headers=key("thrifty"))
    )
    async with asyncio.timeout(20):
        while not guarded.metric("warmpath_completion_tokens_total"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    if has_left:
        disconnect.set()
        await asyncio.wait_for(call, 20)
    guarded.calls.scripts = {}
    assert (await ask(guarded, "thrifty", "x")).status_code == 200
    ((replica_id, request), _) = guarded.calls.requests
    ended = RequestEnded(request.request_id, request.attempt, 71)
    for _ in range(2):
        guarded.parts.routing.on_load(replica_id, Load(ended=(ended,)))
    disconnect.set()
    await asyncio.wait_for(call, 20)
    refused = await ask(guarded, "thrifty", "x")
    assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
    # 78 of 40 tokens, and one more is wanted. Twice it would be more than a minute and a half later.
    assert 40 <= int(refused.headers["retry-after"]) <= 59


COSTLY = "x" * 30  # of the 40 tokens that "thrifty" has


async def late(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
    """Its prompt was computed until then; no test need wait for that."""
    assert request.deadline_s is not None
    raise DeadlineExceeded(request.deadline_s, request.deadline_s)
    yield


async def ask_in_a_hurry(
    router: RouterUnderTest, given_s: str | None, prompt: Any = COSTLY
) -> httpx.Response:
    headers = key("thrifty") | ({} if given_s is None else {"x-warmpath-timeout": given_s})
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    return await router.client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    ("given_s", "most_s", "is_charged"),
    [("30", None, True), ("30", 60.0, True), (None, 30.0, False), ("60", 30.0, False)],
)
async def test_a_prompt_that_was_computed_until_its_clients_deadline_is_charged(
    tmp_path: Path, given_s: str | None, most_s: float | None, is_charged: bool
) -> None:
    """It was given back, so that a client in a hurry had thousands of tokens computed for nothing.
    Everybody's deadline is the server's."""
    async with RouterUnderTest(tenants=settings(tmp_path), request_timeout_s=most_s) as router:
        router.follow(late)
        refused = await ask_in_a_hurry(router, given_s)
        assert (refused.status_code, code_of(refused)) == (504, "deadline_exceeded")
        again = await ask_in_a_hurry(router, given_s)
        assert again.status_code == (429 if is_charged else 504)


async def test_a_batch_is_charged_where_a_replica_took_any_of_its_prompts(guarded: RouterUnderTest) -> None:
    guarded.follow(late)
    assert (await ask_in_a_hurry(guarded, "30", [COSTLY[:15]] * 2)).status_code == 504
    assert (await ask_in_a_hurry(guarded, "30")).status_code == 429


async def test_a_prompt_that_no_replica_took_until_its_clients_deadline_is_not_charged(
    guarded: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize_slowly(guarded, monkeypatch, 0.03)
    for _ in range(3):
        assert (await ask_in_a_hurry(guarded, "0.02")).status_code == 504
    assert guarded.calls.requests == []
    assert (await ask_in_a_hurry(guarded, None)).status_code == 200


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_client_that_leaves_is_charged_for_what_a_replica_took(
    guarded: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, is_placed: bool
) -> None:
    """Leaving is a deadline of which nobody was told. What waits at the Router has cost nothing."""
    began, placer = asyncio.Event(), guarded.parts.dispatcher.placer

    async def never(*_arguments: Any, **_options: Any) -> Any:
        began.set()
        await asyncio.Event().wait()

    async def silent(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        await never()
        yield Delta("", (), 0)

    with monkeypatch.context() as patches:
        if is_placed:
            guarded.follow(silent)
        else:
            patches.setattr(placer, "place", never)
        asking = asyncio.create_task(ask(guarded, "thrifty", COSTLY))
        await asyncio.wait_for(began.wait(), 20)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    guarded.calls.scripts = {}
    assert (await ask(guarded, "thrifty", COSTLY)).status_code == (429 if is_placed else 200)
