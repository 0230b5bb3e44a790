"""How another replica goes on with what one has begun, or never did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from cache.errors import (
    ForwardFailed,
    HandedOver,
    PiecesLost,
    QueueFull,
    RequestRefused,
)
from cache.events import Load, StepTimeModel
from cache.messages import Delta, GenerateRequest, SamplingParams
from cache.types import ReplicaId, RequestId
from router.errors import AllBusy, ReplicaLost
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
from tests.fakes.http import BLOCK_SIZE, RouterUnderTest, counting, text_of
from tests.fakes.router import query


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ReplicaLost("gone"), "replica_lost"),
        (QueueFull(1, 1), "busy"),
        (ForwardFailed("x"), "forward_failed"),
        (RequestRefused("stopping"), "replica_lost"),
        (HandedOver(), "handed_over"),
    ],
)
@pytest.mark.parametrize(("after", "phase"), [(0, "before_first_token"), (2, "mid_stream")])
async def test_it_continues_elsewhere_with_the_same_text(
    router: RouterUnderTest, error: Exception, why: str, after: int, phase: str
) -> None:
    first_only(router, failing(error, after))
    assert await run(a_generation(router)) == EXPECTED
    (first, _), (second, request) = router.calls.requests
    assert first != second
    assert request.excluded_replicas == {first}
    assert request.num_prompt_tokens == len(PROMPT)
    assert len(request.token_ids) == len(PROMPT) + 2 * after
    assert request.sent_chars == sum(len(text_of(i)) for i in range(2 * after))
    assert router.metric("warmpath_retries_total", why=why, phase=phase) == 1


@pytest.mark.parametrize("after", [0, 2])
async def test_lost_deltas_are_nobodys_failure_and_go_on_where_they_are_cached(after: int) -> None:
    async with RouterUnderTest(num_replicas=1, max_attempts=2, max_deaths=1) as router:
        first_only(router, failing(PiecesLost(), after))
        assert await run(a_generation(router)) == EXPECTED
        (first, _), (second, request) = router.calls.requests
        assert first == second
        assert request.excluded_replicas == frozenset()
        assert len(request.token_ids) == len(PROMPT) + 2 * after
        phase = "mid_stream" if after else "before_first_token"
        assert router.metric("warmpath_retries_total", why="deltas_lost", phase=phase) == 1


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_an_answer_whose_deltas_were_lost_is_not_refused_while_others_wait_too_long(
    binding: str,
) -> None:
    """It was let in once, and its client has a part of it: it is no newcomer, though it excludes nobody."""
    async with RouterUnderTest(num_replicas=2, binding=binding, max_wait_s=1.0) as router:
        step_time = StepTimeModel(base_s=0.01, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.001)
        idle = Load(free_blocks=1000, total_blocks=1000, step_time=step_time)

        def report(load: Load) -> None:
            for name in router.replicas:
                router.parts.routing.on_load(name, load)

        async def lose_in_a_crowd(request: GenerateRequest, name: ReplicaId) -> AsyncGenerator[Delta, None]:
            async for delta in counting(request, name):
                yield delta
                report(msgspec.structs.replace(idle, queued_uncached_tokens=20_000, num_waiting=3))
                with pytest.raises(AllBusy):
                    await run(a_generation(router, request_id=RequestId("newcomer")))
                asyncio.get_running_loop().call_later(0.01, report, idle)
                raise PiecesLost

        report(idle)
        first_only(router, lose_in_a_crowd)
        assert await run(a_generation(router)) == EXPECTED
        assert_nothing_in_flight(router)


@pytest.mark.parametrize("binding", ["late", "at_once"])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), PiecesLost()])
async def test_an_answer_that_lost_its_replica_waits_for_room_where_all_are_full(
    binding: str, error: Exception
) -> None:
    """With `at_once` it was refused as one too many, in the middle of the answer."""
    async with RouterUnderTest(num_replicas=3, binding=binding) as router:
        full = Load(num_waiting=10**6, free_blocks=1000, total_blocks=1000)

        def report(load: Load) -> None:
            for name in router.parts.routing.replicas:
                router.parts.routing.on_load(name, load)

        async def lose_among_full_ones(
            request: GenerateRequest, name: ReplicaId
        ) -> AsyncGenerator[Delta, None]:
            async for delta in counting(request, name):
                yield delta
                report(full)
                with pytest.raises(AllBusy):
                    router.parts.routing.choose(query("somebody else"))
                asyncio.get_running_loop().call_later(0.05, report, Load(free_blocks=1000, total_blocks=1000))
                raise error

        first_only(router, lose_among_full_ones)
        assert await run(a_generation(router)) == EXPECTED
        assert len(router.calls.requests) == 2
        assert router.parts.dispatcher.placer.num_held == 0
        assert_nothing_in_flight(router)


async def test_the_next_attempt_is_matched_on_prompt_and_tokens_so_far(router: RouterUnderTest) -> None:
    first_only(router, failing(ReplicaLost("gone"), 2))
    await run(a_generation(router))
    _, request = router.calls.requests[1]
    assert list(request.block_hashes) == HASHER.chain(HASHER.root(), request.token_ids)
    assert len(request.block_hashes) == (len(PROMPT) + 4) // BLOCK_SIZE


@pytest.mark.parametrize("num_sent", [0, 2])
async def test_once_a_prompt_is_scored_its_stream_is_continued_where_it_is_cached(
    router: RouterUnderTest, num_sent: int
) -> None:
    """Its log probabilities come with the first token: after that nobody computes all of it again."""
    first_only(router, failing(ReplicaLost("gone"), num_sent))
    await run(a_generation(router, sampling=SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1)))
    first, second = (request for _, request in router.calls.requests)
    chain = HASHER.chain(HASHER.root(), second.token_ids)
    assert list(first.block_hashes) == []
    assert list(second.block_hashes) == (chain if num_sent else [])


async def test_several_answers_go_on_elsewhere_each_from_where_it_was(router: RouterUnderTest) -> None:
    """One has ended, two have not: the next replica is told of each, and none says anything twice."""

    async def lost(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        sent = 0
        async for delta in count_several(request, replica_id):
            if request.attempt == 0 and sent == 8:
                raise ReplicaLost("gone")
            sent += 1
            yield delta

    router.follow(lost)
    texts = {0: "", 1: "", 2: ""}
    async for delta in a_generation(router, n=3).deltas():
        texts[delta.choice] += delta.text
    assert texts == {0: "00 01 02 ", 1: "10 11 12 13 ", 2: "20 21 22 "}
    (_, first), (_, second) = router.calls.requests
    assert (first.n, first.answers) == (3, ())
    assert second.token_ids == PROMPT
    assert [answer.token_ids.tolist() for answer in second.answers] == [
        [0, 1, 2],
        [100, 101, 102],
        [200, 201],
    ]
    assert [answer.sent_chars for answer in second.answers] == [9, 9, 6]
    assert [answer.is_over for answer in second.answers] == [True, False, False]
    assert second.num_answers_left == 2
