"""Several prompts in one request: an answer and a decision for each, and one end for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.placement.decision import Placement, RouteQuery
from tests.fakes.http import RouterUnderTest, events_of


async def test_prompts_of_a_batch_keep_their_index_and_add_up(router: RouterUnderTest) -> None:
    body = (await router.complete(["ab", "c", [1, 2, 3]])).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {"t0 t1 t2 t3 t4 "}
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 15
    assert len({request.request_id for _, request in router.calls.requests}) == 3


async def test_a_streamed_batch_finishes_each_choice_once(router: RouterUnderTest) -> None:
    answer = await router.complete(["a", "b", "c"], stream=True)
    choices = [json.loads(event)["choices"][0] for event in events_of(answer.content)[:-1]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "t0 t1 t2 t3 t4 "
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]


async def test_a_batch_of_which_one_fails_fails_and_cancels_the_others(router: RouterUnderTest) -> None:
    async def script(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        if request.request_id.endswith("-1"):
            raise ValueError("bug")
        yield Delta("a", (1,), 0)
        await asyncio.Event().wait()

    router.follow(script)
    answer = await router.complete(["a", "b", "c"])
    assert answer.status_code == 500
    assert router.calls.running == 0
    assert router.parts.routing.statistics().in_flight == 0


@pytest.mark.parametrize("binding", ["at_once", "late"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_batch_of_64_prompts_is_64_decisions(binding: str, stream: bool) -> None:
    """Each prompt goes where it is cached; none waits for another one's place."""
    async with RouterUnderTest(num_replicas=4, binding=binding) as router:
        prompts = [f"{index:02d} is a prompt" for index in range(64)]
        answer = await asyncio.wait_for(router.complete(prompts, stream=stream), 20)
        assert answer.status_code == 200, answer.text
        requests = [request for _, request in router.calls.requests]
        assert len({request.request_id for request in requests}) == 64
        assert sorted(bytes(list(request.token_ids)).decode() for request in requests) == prompts
        decided = sum(
            sample.value
            for metric in router.parts.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "warmpath_decisions_total"
        )
        assert decided == 64
        assert len({replica for replica, _ in router.calls.requests}) == 4
        assert router.parts.routing.statistics().in_flight == 0
        if not stream:
            assert [choice["index"] for choice in answer.json()["choices"]] == list(range(64))


async def test_each_prompt_of_a_batch_is_its_part_of_what_waits(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that overload is told from a few clients with batches (`router/placement/overload.py`)."""
    placer, parts = router.parts.dispatcher.placer, []
    place = placer.place

    async def spied(query: RouteQuery, *, since: float, deadline: float | None) -> Placement:
        parts.append(query.part)
        return await place(query, since=since, deadline=deadline)

    monkeypatch.setattr(placer, "place", spied)
    for prompts in (["a", "b", "c", "d"], ["a"]):
        assert (await router.complete(prompts)).status_code == 200
    assert parts == [0.25, 0.25, 0.25, 0.25, 1.0]
