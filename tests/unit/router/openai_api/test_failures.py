"""Generations that fail: a status code before the first token, a cut connection after it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

import httpx
import pytest
from fastapi import FastAPI

from cache.errors import DeadlineExceeded, ForwardFailed, LeftUnread, QueueFull
from cache.errors import PromptTooLong as ReplicaPromptTooLong
from cache.events import Load
from cache.messages import Delta
from router.dashboard.view import Dashboard
from router.errors import AnswerNotTaken, NoReplica, ReplicaLost
from router.fleet.gather import FleetMetrics
from router.insight.insight import Insight
from router.limits import Limits
from router.openai_api.about import About
from router.openai_api.failures import FailureMiddleware
from router.openai_api.prefixes import Prefixes
from router.openai_api.streams import BrokenStream
from tests.fakes.generations import assert_nothing_in_flight
from tests.fakes.http import MODEL, RouterUnderTest, asgi_call, error_of, events_of
from tests.fakes.proxied import until

SECRET = "a secret prompt"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFull(1, 1), 429, "rate_limit_error", "server_busy"),
        (ReplicaLost("gone"), 500, "server_error", "too_many_deaths"),
        (ForwardFailed(SECRET), 500, "server_error", "forward_failed"),
        (DeadlineExceeded(1, 2), 504, "timeout_error", "deadline_exceeded"),
        (ReplicaPromptTooLong(300, 200), 400, "invalid_request_error", "context_length_exceeded"),
        (ValueError(SECRET), 500, "server_error", "internal_error"),
        (asyncio.CancelledError(SECRET), 500, "server_error", "internal_error"),  # not this request's own
    ],
)
async def test_a_failure_before_the_first_token_has_a_status_code(
    router: RouterUnderTest, error: BaseException, status: int, kind: str, code: str, stream: bool
) -> None:
    router.answer_with(error)
    answer = await router.chat(stream=stream)
    assert answer.status_code == status
    assert (error_of(answer)["type"], error_of(answer)["code"]) == (kind, code)
    assert SECRET not in answer.text
    assert ("retry-after" in answer.headers) is (status == 429)


async def test_a_stream_that_fails_ends_in_an_error_event_and_a_cut_connection(
    router: RouterUnderTest,
) -> None:
    """Never a clean end: clients would take what they have for the whole answer."""
    router.answer_with(Delta("a", (1,), 0), ForwardFailed(SECRET))
    body = {"model": MODEL, "prompt": "x", "stream": True}
    sent = await asgi_call(router.api, "/v1/completions", body, asyncio.Event())
    assert isinstance(sent[-1], BrokenStream)
    *_, last = [message for message in sent if isinstance(message, dict)]
    assert last["more_body"] is True
    error = json.loads(events_of(last["body"])[0])["error"]
    assert error["code"] == "forward_failed"
    assert SECRET not in str(sent)
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="broken_stream") == 1


async def test_a_stream_that_its_client_did_not_read_is_no_failure_of_ours(router: RouterUnderTest) -> None:
    """An alert watches those."""
    router.answer_with(Delta("a", (1,), 0), LeftUnread(9, 8))
    sent = await asgi_call(
        router.api, "/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}, asyncio.Event()
    )
    assert isinstance(sent[-1], BrokenStream)
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="invalid") == 1
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="broken_stream") == 0


async def test_a_client_that_takes_nothing_keeps_no_place() -> None:
    """It had one at the Router and one at the replica for as long as it stayed, whatever was computed."""
    async with RouterUnderTest(limits=Limits(max_unread_seconds=1)) as router:
        router.answer_with(Delta("a", (1,), 0), Delta("b", (2,), 0), then_hang=True)
        body = {"model": MODEL, "prompt": "x", "stream": True}
        sent = await asgi_call(router.api, "/v1/completions", body, asyncio.Event(), reads=False)
        assert isinstance(sent[-1], AnswerNotTaken)
        assert (router.calls.running, router.calls.cancelled) == (0, 1)
        assert_nothing_in_flight(router)
        assert router.metric("warmpath_requests_total", endpoint="completions", outcome="invalid") == 1


async def test_who_still_waits_when_its_router_is_stopped_is_told_to_try_again() -> None:
    """It was "Internal Server Error", in plain text."""
    async with RouterUnderTest(binding="late") as router:
        for replica_id in router.replicas:
            router.parts.routing.on_load(replica_id, Load(num_waiting=10**6))
        asking = asyncio.create_task(router.chat())
        await until(lambda: router.parts.dispatcher.placer.num_held == 1)
        router.parts.dispatcher.close()
        answer = await asking
    assert (answer.status_code, error_of(answer)["code"]) == (503, "router_leaves")
    assert answer.headers["retry-after"] == "1"


async def test_without_replicas_the_answer_is_503(router: RouterUnderTest) -> None:
    router.parts.routing.update_replicas({})
    answer = await router.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


async def test_a_failure_is_logged_with_its_request_id(
    router: RouterUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    router.answer_with(ValueError(SECRET))
    router.client.headers["x-request-id"] = "mine-2"
    await router.chat(SECRET)
    (line,) = [record for record in caplog.records if record.message == "request failed"]
    assert line.__dict__["request_id"] == "mine-2"
    assert SECRET not in caplog.text


BEHIND: list[tuple[str, type, str]] = [
    ("/metrics", FleetMetrics, "text"),
    ("/version", About, "version"),
    ("/v1/models", About, "models"),
    ("/openapi.json", FastAPI, "openapi"),
    ("/debug/route", Insight, "latest"),
    ("/dashboard/data", Dashboard, "view"),
    ("/v1/prefixes", Prefixes, "listed"),
    ("/v1/prefixes/x", Prefixes, "one"),
]


@pytest.mark.parametrize("error", [ValueError(SECRET), asyncio.CancelledError(SECRET)], ids=repr)
@pytest.mark.parametrize(("path", "owner", "name"), BEHIND)
async def test_a_failure_that_no_handler_foresaw_has_the_same_shape_on_every_path(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    owner: type,
    name: str,
    error: BaseException,
) -> None:
    """The server behind sees none of it: it would log the text, which may quote a prompt. And what was
    cancelled under a request, by whoever made it wait, would be answered in plain text."""

    def fail(*_arguments: Any, **_named: Any) -> NoReturn:
        raise error

    async with RouterUnderTest(expose_debug=True, dashboard=True) as router:
        monkeypatch.setattr(owner, name, fail)
        strict = httpx.ASGITransport(router.api, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=strict, base_url="http://router") as client:
            answer = await client.get(path, headers={"x-request-id": "mine-3"})
    assert answer.status_code == 500
    assert (error_of(answer)["type"], error_of(answer)["code"]) == ("server_error", "internal_error")
    assert answer.headers["x-request-id"] == "mine-3"
    (line,) = [record for record in caplog.records if record.message == "request failed"]
    assert line.__dict__["request_id"] == "mine-3"
    assert SECRET not in answer.text + caplog.text


async def test_a_failure_that_is_known_keeps_its_status_wherever_it_is_raised(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> NoReturn:
        raise NoReplica

    monkeypatch.setattr(Prefixes, "listed", fail)
    answer = await router.client.get("/v1/prefixes")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "no_replica")
    assert answer.headers["retry-after"] == "1"


async def test_health_that_cannot_be_told_is_an_error_object(router: RouterUnderTest) -> None:
    def fail() -> NoReturn:
        raise ValueError(SECRET)

    router.parts.service.readiness = fail
    answer = await router.client.get("/health")
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")


async def test_a_failure_after_the_answer_has_begun_goes_on_to_the_server() -> None:
    """It cuts the connection; a second answer would be taken for more of the first."""

    async def fails_late(_scope: Any, _receive: Any, send: Any) -> NoReturn:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError(SECRET)

    sent = await asgi_call(FailureMiddleware(fails_late), "/", {}, asyncio.Event())
    assert isinstance(sent[-1], ValueError)
    assert [message["type"] for message in sent if isinstance(message, dict)] == ["http.response.start"]
