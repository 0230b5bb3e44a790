"""Headers: request ids, what a client says of its session, and what routing shows and takes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.fakes.http import MODEL, RouterUnderTest, error_of
from tests.http_server import scripted_server

SECRET = "a secret prompt"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1.2:3_X", True),
        ("x" * 128, True),
        ("Root=1-67891233-abcdef012345678912345678", True),
        ("q83v/+A0Zw==", True),
        ("x" * 129, False),
        *((given, False) for given in ("a b", "é", "", 'a"b', "a,b", "a;b", "<a>", "a%0A", "a\tb", "{a}")),
    ],
)
async def test_the_request_id_is_echoed_if_it_is_harmless(
    router: RouterUnderTest, given: str, is_kept: bool
) -> None:
    answer = await router.client.get("/live", headers={"x-request-id": given.encode("latin-1")})  # type: ignore[dict-item]
    echoed = answer.headers.get_list("x-request-id")
    assert len(echoed) == 1
    assert (echoed == [given]) is is_kept
    assert echoed[0]


async def test_a_base64_request_id_begins_the_answers_id_and_is_found_again() -> None:
    given = "q83v/+A0Zw=="
    async with RouterUnderTest(expose_debug=True) as router:
        router.client.headers["x-request-id"] = given
        answer = (await router.complete()).json()
        assert answer["id"].startswith(f"cmpl-{given}-")
        for request_id in given, answer["id"]:
            page = await router.client.get("/debug/route", params={"request_id": request_id})
            assert page.status_code == 200
        assert given not in (await router.client.get("/metrics")).text


async def test_one_request_id_used_twice_at_once_is_two_requests(router: RouterUnderTest) -> None:
    headers = {"x-request-id": "same"}
    body = {"model": MODEL, "prompt": "x"}
    answers = await asyncio.gather(
        *(router.client.post("/v1/completions", json=body, headers=headers) for _ in range(3))
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({request.request_id for _, request in router.calls.requests}) == 3


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_id_is_in_the_log_and_reaches_the_replica(
    caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    async with RouterUnderTest(log_requests=True) as router:
        router.client.headers["x-request-id"] = "mine-1"
        with caplog.at_level("INFO", logger="router"):
            await getattr(router, path)(SECRET, stream=stream)
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert line.__dict__["request_id"] == "mine-1"
    assert line.__dict__["outcome"] == "ok"
    assert router.calls.requests[0][1].request_id.startswith("mine-1-")
    assert not any(SECRET in str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize("stream", [True, False])
async def test_routing_headers_are_behind_a_switch(stream: bool) -> None:
    names = ("x-warmpath-replica", "x-warmpath-cached-tokens", "x-warmpath-overlap-blocks")
    async with RouterUnderTest() as silent:
        answer = await silent.chat(stream=stream)
        assert not any(name in answer.headers for name in names)
    async with RouterUnderTest(expose_routing=True) as open_router:
        first = await open_router.chat("x" * 40, stream=stream)
        second = await open_router.chat("x" * 40, stream=stream)
        assert first.headers[names[0]] == second.headers[names[0]] == open_router.calls.requests[0][0]
        assert first.headers[names[2]] == "0"
        assert int(second.headers[names[2]]) > 0


async def test_the_policy_header_counts_only_behind_the_switch() -> None:
    headers = {"x-warmpath-policy": "round_robin"}
    body = {"model": MODEL, "prompt": "0123456789"}
    async with RouterUnderTest(expose_routing=True) as router:
        for _ in range(4):
            await router.client.post("/v1/completions", json=body, headers=headers)
        visited = [replica_id for replica_id, _ in router.calls.requests]
        assert sorted(visited) == sorted(router.replicas * 2)
        answer = await router.client.post("/v1/completions", json=body, headers={"x-warmpath-policy": "?"})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "x-warmpath-policy"
    async with RouterUnderTest() as router:
        answer = await router.client.post("/v1/completions", json=body, headers={"x-warmpath-policy": "?"})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-session-id": "s"}, {}),
        ({"x-session-affinity": "s"}, {}),
        ({}, {"prompt_cache_key": "s"}),
        ({"x-session-id": "s"}, {"prompt_cache_key": "other"}),
    ],
)
async def test_what_names_a_session_keeps_it_in_one_place(
    headers: dict[str, str], fields: dict[str, Any]
) -> None:
    visited = []
    for more in (headers, fields), ({}, {}):
        async with RouterUnderTest(num_replicas=8, policy="session_affinity") as router:
            for prompt in ("one", "two", "three", "four"):
                body = {"model": MODEL, "prompt": prompt, **more[1]}
                answer = await router.client.post("/v1/completions", json=body, headers=more[0])
                assert answer.status_code == 200, answer.text
            visited.append(len({replica for replica, _ in router.calls.requests}))
    with_session, without = visited
    assert with_session == 1 < without


def test_a_body_lost_with_an_upgrade_is_told_from_one_that_was_not_sent() -> None:
    """Java's client asks for HTTP/2 over plain HTTP like this; uvicorn drops the body."""
    upgrade = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAEAAEAAAAIAAAAB",
    }
    with scripted_server(RouterUnderTest()) as server:
        answers = [
            httpx.post(f"{server.url}/v1/completions", headers=headers, json=sent)
            for headers, sent in ((upgrade, {"model": MODEL, "prompt": "a"}), ({}, None))
        ]
    assert [(answer.status_code, error_of(answer)["code"]) for answer in answers] == [
        (400, "malformed_json")
    ] * 2
    assert ["HTTP/1.1" in error_of(answer)["message"] for answer in answers] == [True, False]
