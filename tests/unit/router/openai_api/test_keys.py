"""API keys over HTTP: what is closed, what a refusal says, and what a key's requests are told apart by."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from starlette.routing import Route

from router.openai_api.door import endpoint_of
from router.openai_api.fields import Endpoint
from router.tenants.gate import OPEN_PATHS
from tests.fakes.guarded import ENTRIES, PROMPT, ask, code_of, key, settings, tokenize_slowly
from tests.fakes.http import MODEL, RouterUnderTest

# --- who comes in -----------------------------------------------------------------------------------


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
