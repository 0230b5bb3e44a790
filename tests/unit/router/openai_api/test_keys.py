"""API keys over HTTP: what is closed, what a refusal says, and what a key's requests are told apart by."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from cache.errors import DeadlineExceeded, QueueFull
from cache.events import Load, RequestEnded
from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from router.openai_api.door import endpoint_of
from router.openai_api.fields import Endpoint
from router.tenants.gate import OPEN_PATHS
from tests.fakes.guarded import ENTRIES, PROMPT, ask, key, settings
from tests.fakes.http import MODEL, RouterUnderTest, asgi_call


def code_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code: str = error["code"]
    return code


# --- who comes in -----------------------------------------------------------------------------------


def tokenize_slowly(router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    encoder = router.parts.service._encoder
    encode_text = encoder.encode_text

    async def slowly(text: str, **options: Any) -> array[int]:
        await asyncio.sleep(seconds)
        return await encode_text(text, **options)

    monkeypatch.setattr(encoder, "encode_text", slowly)


async def test_every_route_but_health_and_live_is_closed(guarded: RouterUnderTest) -> None:
    routes = [route for route in guarded.api.routes if isinstance(route, Route)]
    assert {"/metrics", "/debug/route", "/version", "/openapi.json", "/tokenize"} <= {r.path for r in routes}
    for route in routes:
        path = route.path.replace("{name:path}", MODEL)
        for method in route.methods or ():
            answer = await guarded.client.request(method, path)
            assert answer.status_code == (200 if path in OPEN_PATHS else 401), (method, path)
    for path in ("/not/there", "/", "/health/", "//health", "/live/../metrics", "/%6detrics"):
        assert (await guarded.client.get(path)).status_code == 401, path


@pytest.mark.parametrize(
    "given", [None, "Bearer wp-secret-canary", "Basic wp-secret-canary", "wp-secret-canary"]
)
async def test_a_refusal_says_how_and_not_what(
    guarded: RouterUnderTest, given: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"x-request-id": "mine"} | ({} if given is None else {"authorization": given})
    answer = await guarded.client.post("/v1/chat/completions", json={}, headers=headers)
    assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"] == "mine"
    assert "canary" not in answer.text + caplog.text
    metrics = await guarded.client.get("/metrics", headers=key("operator"))
    assert "canary" not in metrics.text
    assert guarded.calls.requests == []


async def test_a_key_opens_the_api_and_an_operators_the_rest(guarded: RouterUnderTest) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/version", "/openapi.json"):
        assert (await guarded.client.get(path, headers=key("bob"))).status_code == 200
    for path in ("/metrics", "/debug/route"):
        refused = await guarded.client.get(path, headers=key("bob"))
        assert (refused.status_code, code_of(refused)) == (403, "insufficient_permissions")
        assert (await guarded.client.get(path, headers=key("operator"))).status_code == 200


async def test_a_browser_is_asked_for_an_operators_key(tmp_path: Path) -> None:
    async with RouterUnderTest(tenants=settings(tmp_path), dashboard=True) as router:
        for path in ("/dashboard", "/dashboard/data"):
            asked = await router.client.get(path)
            assert (asked.status_code, code_of(asked)) == (401, "invalid_api_key")
            assert asked.headers["www-authenticate"].startswith('Basic realm="')
            shown = await router.client.get(path, auth=("anything", "key of operator"))
            assert shown.status_code == 200
        assert (await router.client.get("/metrics", auth=("", "key of operator"))).status_code == 401


async def test_without_keys_nobody_is_asked(router: RouterUnderTest) -> None:
    assert router.parts.tenancy.gate is None
    assert (await router.complete()).status_code == 200
    assert (await router.client.get("/metrics")).status_code == 200


async def test_what_is_refused_is_counted_by_why_and_by_nobodys_name(guarded: RouterUnderTest) -> None:
    await guarded.client.get("/v1/models")
    await guarded.client.get("/v1/models", headers=key("nobody"))
    await guarded.client.get("/metrics", headers=key("bob"))
    for _ in range(3):
        await ask(guarded, "limited")
    for why in ("missing", "unknown", "not_permitted", "requests_limit"):
        assert guarded.metric("warmpath_key_refusals_total", why=why) == 1
    assert guarded.metric("warmpath_api_keys") == len(ENTRIES)
    text = (await guarded.client.get("/metrics", headers=key("operator"))).text
    assert not [name for name in ("alice", "acme", "bob", "thrifty") if name in text]


async def test_who_is_refused_at_the_door_is_counted_once_and_as_the_endpoint_would(
    guarded: RouterUnderTest,
) -> None:
    """Of the limited key's requests two are answered, and the third is refused before any handler."""

    def counted() -> dict[tuple[str, str], float]:
        return {
            (sample.labels["endpoint"], sample.labels["outcome"]): sample.value
            for family in guarded.parts.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "warmpath_requests_total" and sample.value
        }

    for _ in range(3):
        await ask(guarded, "limited")
    assert counted() == {("completions", "ok"): 2, ("completions", "limited"): 1}
    await ask(guarded, "nobody")
    await guarded.client.post("/tokenize", json={"prompt": "x"})
    await guarded.client.delete("/v1/prefixes/prefix-1")
    large = {"authorization": "x" * 20_000}
    await guarded.client.post("/v1/chat/completions", json={}, headers=large)
    at_the_door = {
        ("completions", "ok"): 2,
        ("completions", "limited"): 1,
        ("completions", "unauthorized"): 1,
        ("tokenize", "unauthorized"): 1,
        ("prefixes", "unauthorized"): 1,
        ("chat/completions", "invalid"): 1,
    }
    assert counted() == at_the_door
    for path in ("/metrics", "/v1/models", "/nowhere"):  # no endpoints: no series of theirs
        await guarded.client.get(path)
        await guarded.client.get(path, headers=key("bob"))
    assert counted() == at_the_door


async def test_every_endpoint_that_counts_is_known_at_the_door(guarded: RouterUnderTest) -> None:
    """Each route that takes a body, and no other, has an endpoint there."""
    posted = {
        route.path
        for route in guarded.api.routes
        if isinstance(route, Route) and "POST" in (route.methods or ())
    }
    known = {path: endpoint_of("POST", path) for path in posted}
    assert set(known.values()) == set(Endpoint)
    assert endpoint_of("DELETE", "/v1/prefixes/prefix-1") is Endpoint.PREFIXES
    assert endpoint_of("GET", "/v1/prefixes") is endpoint_of("POST", "/metrics") is None


async def test_the_log_names_whose_key_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="router"):
        async with RouterUnderTest(tenants=settings(tmp_path), log_requests=True) as router:
            await ask(router, "alice")
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert line.__dict__["key"] == "alice"


# --- shares, priorities, deadlines ------------------------------------------------------------------


async def test_replicas_hear_of_share_and_priority(guarded: RouterUnderTest) -> None:
    """A key that may only stand back does so unasked."""
    for name, fields in (
        ("heavy", {}),
        ("batch", {}),
        ("batch", {"priority": 7}),
        ("front", {}),
        ("front", {"priority": -2}),
        ("bob", {"priority": None}),
    ):
        assert (await ask(guarded, name, **fields)).status_code == 200
    told = [(request.tenant, request.share, request.priority) for _, request in guarded.calls.requests]
    assert told == [
        ("heavy", 3.0, 0),
        ("batch", 1.0, 4),
        ("batch", 1.0, 7),
        ("front", 1.0, 0),
        ("front", 1.0, -2),
        ("bob", 1.0, 0),
    ]


@pytest.mark.parametrize(("name", "least"), [("bob", 0), ("batch", 4), ("front", -2)])
async def test_no_key_goes_before_what_it_may(guarded: RouterUnderTest, name: str, least: int) -> None:
    refused = await ask(guarded, name, priority=least - 1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert f"at least {least} " in refused.json()["error"]["message"]
    assert not guarded.calls.requests


async def test_without_keys_any_priority_of_the_range_may_be_asked_for(router: RouterUnderTest) -> None:
    for priority, status in ((-10, 200), (10, 200), (-11, 400), (11, 400), (True, 400)):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "priority": priority}
        assert (await router.client.post("/v1/completions", json=body)).status_code == status
    assert [request.priority for _, request in router.calls.requests] == [-10, 10]


async def test_the_time_that_its_prompt_takes_to_tokenize_is_the_client_s_too(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize_slowly(router, monkeypatch, 0.2)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    answer = await router.client.post("/v1/completions", json=body, headers={"x-warmpath-timeout": "2.5"})
    assert answer.status_code == 200
    [(_, request)] = router.calls.requests
    assert request.deadline_s is not None
    assert request.deadline_s <= 2.5 - 0.2
    late = await router.client.post("/v1/completions", json=body, headers={"x-warmpath-timeout": "0.1"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert len(router.calls.requests) == 1


async def test_replicas_hear_how_long_the_client_waits(router: RouterUnderTest) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    headers = {"x-warmpath-timeout": "2.5"}
    assert (await router.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert (await router.client.post("/v1/completions", json=body)).status_code == 200
    first, second = [request.deadline_s for _, request in router.calls.requests]
    assert first is not None
    assert 0.0 < first <= 2.5
    assert second is None
    for wrong in ("0", "-1", "nan", "inf", "soon", "86401", "5_000"):
        refused = await router.client.post(
            "/v1/completions", json=body, headers={"x-warmpath-timeout": wrong}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "x-warmpath-timeout"


# --- limits -----------------------------------------------------------------------------------------


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
