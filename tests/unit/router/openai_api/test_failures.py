"""Generations that fail: a status code before the first token, a cut connection after it."""

from __future__ import annotations

import asyncio
import json

import pytest

from cache.errors import DeadlineExceeded, ForwardFailed, QueueFull
from cache.errors import PromptTooLong as ReplicaPromptTooLong
from cache.messages import Delta
from router.errors import ReplicaLost
from router.openai_api.streams import BrokenStream
from tests.fakes.http import MODEL, RouterUnderTest, asgi_call, error_of, events_of

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
    ],
)
async def test_a_failure_before_the_first_token_has_a_status_code(
    router: RouterUnderTest, error: Exception, status: int, kind: str, code: str, stream: bool
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
