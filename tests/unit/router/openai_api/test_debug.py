"""`GET /debug/route` through ASGI, and the metrics that come from the same watchers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cache.errors import ConfigError, QueueFull
from cache.messages import Delta, FinishReason, GenerateRequest
from cache.types import ReplicaId
from router.config import RecordConfig
from router.errors import ReplicaLost
from router.insight.accounting import UncachedReason
from router.insight.debug_view import DebugPage
from tests.fakes.http import BLOCK_SIZE, MODEL, RouterUnderTest, counting

TOKEN = "a token of many letters"
SECRET = "a secret prompt"


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest(expose_debug=True, shadow_policy="round_robin") as under_test:
        yield under_test


async def page(router: RouterUnderTest, **query: str) -> DebugPage:
    answer = await router.client.get("/debug/route", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return msgspec.json.decode(answer.content, type=DebugPage, strict=True)


def only_trace(folder: Path) -> str:
    [path] = folder.glob("*.jsonl")
    return path.read_text()


async def test_it_is_off_by_default() -> None:
    async with RouterUnderTest() as router:
        answer = await router.client.get("/debug/route")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_a_token_is_asked_for_when_there_is_one() -> None:
    async with RouterUnderTest(expose_debug=True, debug_token=TOKEN) as router:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
            answer = await router.client.get("/debug/route", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
            assert TOKEN not in answer.text
        answer = await router.client.get("/debug/route", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200


async def test_a_request_is_found_by_any_of_its_names(router: RouterUnderTest) -> None:
    answer = await router.client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        headers={"x-request-id": "mine"},
    )
    shown = answer.json()["id"]
    for name in (shown, shown.removeprefix("chatcmpl-"), "mine"):
        [request] = (await page(router, request_id=name)).requests
        assert f"chatcmpl-{request.request_id}" == shown


async def test_an_unknown_request_is_a_404_that_says_who_does_not_know(router: RouterUnderTest) -> None:
    answer = await router.client.get("/debug/route", params={"request_id": "never"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
    assert answer.headers["x-warmpath-router"] == (await page(router)).summary.router


async def test_every_answer_says_how_many_routers_there_are() -> None:
    async with RouterUnderTest(expose_debug=True, place=(1, 3)) as router:
        assert (await page(router)).summary.num_routers == 3
        answer = await router.client.get("/debug/route", params={"request_id": "never"})
        assert answer.headers["x-warmpath-routers"] == "3"


@pytest.mark.parametrize("last", ["-1", "x", "201", "", "²", "9" * 50])
async def test_a_wrong_count_is_named(router: RouterUnderTest, last: str) -> None:
    answer = await router.client.get("/debug/route", params={"last": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last")


async def test_the_newest_come_first_and_the_oldest_are_forgotten() -> None:
    async with RouterUnderTest(expose_debug=True, debug_requests=3) as router:
        for number in range(5):
            await router.complete(f"prompt {number}")
        found = await page(router, last="10")
        assert len(found.requests) == 3
        totals = [request.total_s for request in found.requests]
        assert None not in totals
        assert found.summary.totals.requests == 5
        assert not (await page(router, last="0")).requests


async def test_decision_and_outcome_are_all_there_and_the_prompt_is_not(router: RouterUnderTest) -> None:
    await router.complete(SECRET * 4, user=SECRET)
    answer = await router.client.get("/debug/route")
    assert SECRET not in answer.text
    [listed] = (await page(router)).requests
    assert len(listed.candidates) == 1
    [request] = (await page(router, request_id=listed.request_id)).requests
    assert (request.policy, request.reason, request.block_size) == ("expected_time", "cold", BLOCK_SIZE)
    assert request.prompt_tokens == 4 * len(SECRET)
    assert request.num_candidates == len(request.candidates) == 2
    assert request.outcome is not None
    assert request.outcome.replica == request.candidates[0].replica
    assert sum(request.outcome.uncached.values()) == request.prompt_tokens - request.outcome.delivered
    assert request.first_token_s is not None
    assert request.total_s is not None
    assert request.output_tokens == 5
    assert request.shadow is not None
    assert request.shadow.policy == "round_robin"


async def test_a_request_bound_late_is_told_like_any_other() -> None:
    """Bound late or at once, times count from when the request wanted a replica."""
    async with RouterUnderTest(binding="late", hold_backlog_s=0.0, expose_debug=True) as router:
        assert (await router.complete("held or not")).status_code == 200
        [request] = (await page(router)).requests
        assert request.held_s >= 0.0
        assert request.outcome is not None
        assert request.first_token_s is not None
        assert request.first_token_s >= request.held_s


async def test_a_retry_names_who_refused(router: RouterUnderTest) -> None:
    first, second = router.replicas

    async def refuse(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        raise QueueFull(1, 1)
        yield

    async def answer(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0)
        yield Delta("t", (1,), 0, FinishReason.LENGTH)

    router.calls.scripts = {first: refuse, second: answer}
    for number in range(20):  # until one is sent to the refusing replica first
        assert (await router.complete(f"{number} prompt")).status_code == 200
        [request] = (await page(router, last="1")).requests
        if request.num_attempts == 2:
            break
    assert (request.attempt, request.rest_to, request.excluded) == (2, None, [first])
    assert request.outcome is not None
    assert request.outcome.replica == second


async def test_a_continued_answer_is_shown_as_it_began(router: RouterUnderTest) -> None:
    """The attempt that computed the first token, and who was sent the rest."""

    async def dies_once(request: GenerateRequest, replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        async for delta in counting(request, replica):
            yield delta
            if not request.attempt:
                raise ReplicaLost("killed")

    router.follow(dies_once)
    assert (await router.complete("prompt", max_tokens=6)).status_code == 200
    (first, _), (second, _) = router.calls.requests
    [request] = (await page(router, last="1")).requests
    assert (request.attempt, request.num_attempts, request.rest_to) == (1, 2, second)
    assert (request.excluded, request.candidates[0].replica) == ([], first)


async def test_the_metrics_sum_up(router: RouterUnderTest) -> None:
    for number in range(3):
        await router.complete(f"prompt {number} of some length")
    uncached = sum(
        router.metric("warmpath_uncached_tokens_total", reason=reason.value) for reason in UncachedReason
    )
    accounted = router.metric("warmpath_prompt_tokens_total")
    assert uncached == accounted - router.metric("warmpath_hit_tokens_total", stage="delivered") > 0
    assert router.metric("warmpath_match_error_blocks_count") == 3
    # One block is common to all three; the scripted replicas find nothing, whatever was expected.
    assert router.metric("warmpath_match_error_blocks_bucket", le="1.0") == 3
    assert router.metric("warmpath_match_within_one_block_ratio") == 1
    agreed, disagreed = (
        router.metric("warmpath_shadow_decisions_total", agrees=a) for a in ("true", "false")
    )
    assert agreed + disagreed == 3
    text = (await router.client.get("/metrics")).text
    assert 'warmpath_uncached_tokens_total{reason="evicted",router=' in text
    assert "warmpath_recorded" not in text


async def test_a_recording_tells_the_sessions_that_headers_name(tmp_path: Path) -> None:
    """An application's one `prompt_cache_key` is no conversation: it made all that came one session."""
    async with RouterUnderTest(record=RecordConfig(folder=str(tmp_path))) as router:
        for header in ("x-session-id", "x-session-affinity", "x-other"):
            await router.client.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "x", "prompt_cache_key": "the application"},
                headers={header: "s"},
            )
    _, *rows = map(json.loads, only_trace(tmp_path).splitlines())
    assert [bool(row.get("session")) for row in rows] == [True, True, False]
    assert rows[0]["session"] == rows[1]["session"]


async def test_a_recording_is_written_out_at_the_end(tmp_path: Path) -> None:
    async with RouterUnderTest(record=RecordConfig(folder=str(tmp_path))) as router:
        await router.complete(SECRET)
        await router.chat(SECRET)
    content = only_trace(tmp_path)
    header, *rows = map(json.loads, content.splitlines())
    assert header["format"] == "warmpath-trace"
    assert [row["output"] for row in rows] == [5, 5]
    assert SECRET not in content


async def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"record\.folder"):
        async with RouterUnderTest(record=RecordConfig(folder=str(tmp_path / "file" / "x"))):
            pass
