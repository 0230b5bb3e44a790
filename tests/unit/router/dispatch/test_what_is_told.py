"""What watchers, metrics and whoever decides hear of a generation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from cache.block_hash import hints
from cache.errors import (
    DeadlineExceeded,
    PiecesLost,
    QueueFull,
)
from cache.events import FORMAT_VERSION, EventBatch, Load, digest_of
from cache.messages import Delta, GenerateRequest, SamplingParams
from cache.types import HashHint, ReplicaId, RequestId
from router.errors import AllBusy, NoReplica, ReplicaLost
from router.placement.observer import SilentObserver
from router.placement.routing import RouteQuery
from tests.fakes.generations import (
    EXPECTED,
    HASHER,
    PROMPT,
    a_generation,
    assert_nothing_in_flight,
    count_several,
    failing,
    first_only,
    run,
)
from tests.fakes.http import BLOCK_SIZE, RouterUnderTest, counting


async def test_who_waits_for_a_first_token_is_told_from_who_has_one(router: RouterUnderTest) -> None:
    """Also while the first of two replicas that it needs has failed, and where nobody reads on."""
    told = list[float]()

    async def script(request: GenerateRequest, name: ReplicaId) -> AsyncGenerator[Delta, None]:
        told.append(router.metric("warmpath_requests_without_token"))
        if len(told) == 1:
            raise ReplicaLost("gone")
        async for delta in counting(request, name):
            yield delta

    router.follow(script)
    async with aclosing(a_generation(router).deltas()) as deltas:
        await anext(deltas)
        assert told == [1, 1]
        assert router.metric("warmpath_requests_without_token") == 0
        assert router.metric("warmpath_requests_in_flight") == 1
    assert_nothing_in_flight(router)


@pytest.mark.parametrize(
    ("error", "hears"), [(ReplicaLost("gone"), 1), (QueueFull(1, 1), 0), (PiecesLost(), 0)]
)
async def test_before_it_goes_on_elsewhere_whoever_decides_hears_that_a_replica_lost_it(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, error: Exception, hears: int
) -> None:
    sent, heard = router.calls.requests, list[int]()  # how many were sent by then
    monkeypatch.setattr(router.parts.routing, "request_lost", lambda: heard.append(len(sent)))
    first_only(router, failing(error, 2))
    assert await run(a_generation(router)) == EXPECTED
    assert heard == [1] * hears


class Refusals(SilentObserver):
    """Who was refused, and who was served."""

    def __init__(self) -> None:
        self.refused_tokens: list[int] = []
        self.num_finished = 0
        self.answers: Sequence[int] = ()

    def refused(self, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        assert len(hints) == query.num_prompt_tokens // BLOCK_SIZE
        self.refused_tokens.append(query.num_prompt_tokens)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self.num_finished += 1
        self.answers = answers


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_watchers_hear_of_who_was_refused(binding: str) -> None:
    """Also of who gave up while it was held: all of them came, though nobody ever had them."""
    refusals = Refusals()
    async with RouterUnderTest(num_replicas=1, binding=binding, max_wait_s=1.0) as router:
        routing = router.parts.routing
        routing.watch(refusals)
        routing.on_load(router.replicas[0], Load(num_waiting=10**6, free_blocks=1000, total_blocks=1000))
        with pytest.raises(AllBusy if binding == "at_once" else DeadlineExceeded):
            await run(a_generation(router, timeout_s=0.05))
        routing.update_replicas({})
        with pytest.raises(NoReplica):
            await run(a_generation(router, request_id=RequestId("late")))
    assert refusals.refused_tokens == [len(PROMPT)] * 2
    assert refusals.num_finished == 0


async def test_watchers_hear_of_who_was_served_once(router: RouterUnderTest) -> None:
    refusals = Refusals()
    router.parts.routing.watch(refusals)
    generation = a_generation(router)
    await run(generation)
    generation.close()
    a_generation(router, request_id=RequestId("never begun")).close()
    assert (refusals.refused_tokens, refusals.num_finished) == ([], 1)


async def test_watchers_hear_of_each_answer(router: RouterUnderTest) -> None:
    refusals = Refusals()
    router.parts.routing.watch(refusals)
    router.follow(count_several)
    lengths = [0, 0, 0]
    async for delta in a_generation(router, n=3).deltas():
        lengths[delta.choice] += len(delta.token_ids)
    assert refusals.answers == lengths == [3, 4, 3]


async def test_a_prompt_that_is_scored_is_not_priced_by_hits_it_does_not_take(
    router: RouterUnderTest,
) -> None:
    """`echo` with log probabilities computes every token, wherever its prefix may be cached."""
    routing = router.parts.routing
    holder = sorted(routing.replicas)[-1]
    stored = tuple(hints(HASHER.chain(HASHER.root(), PROMPT)))
    routing.on_events(holder, EventBatch(FORMAT_VERSION, 1, 1, stored, (), digest_of(stored), Load()))
    plain = a_generation(router)
    await run(plain)
    assert (plain.replica_id, plain.overlap_blocks) == (holder, len(PROMPT) // BLOCK_SIZE)
    scored = a_generation(router, sampling=SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1))
    await run(scored)
    assert scored.overlap_blocks == 0
    assert router.metric("warmpath_decisions_total", policy="expected_time", reason="cold") == 1


async def test_expected_and_actual_hits_are_counted(router: RouterUnderTest) -> None:
    async def cached(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        async for delta in counting(request, replica_id):
            yield Delta(delta.text, delta.token_ids, 8, delta.finish_reason)

    router.follow(cached)
    first, second = a_generation(router), a_generation(router)
    await run(first)
    await run(second)
    assert first.overlap_blocks == 0
    assert second.overlap_blocks == 3  # predicted when the first was routed
    assert second.cached_tokens == 8
    assert second.replica_id == first.replica_id
    assert router.metric("warmpath_hit_tokens_total", stage="captured") == 12
    assert router.metric("warmpath_hit_tokens_total", stage="delivered") == 16
