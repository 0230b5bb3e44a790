"""What is tried again, what is not, and what is left of it however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cache.errors import (
    DeadlineExceeded,
    ForwardFailed,
    LeftUnread,
    PromptTooLong,
    QueueFull,
    ServingError,
)
from cache.messages import Delta, GenerateRequest
from cache.types import ReplicaId
from router.errors import NoReplica, ReplicaLost
from tests.fakes.generations import (
    EXPECTED,
    a_generation,
    assert_nothing_in_flight,
    count_several,
    failing,
    first_only,
    run,
)
from tests.fakes.http import RouterUnderTest, text_of


async def test_a_replica_hears_how_long_a_request_has_waited(router: RouterUnderTest) -> None:
    """Of all its attempts: its age counts in the next replica's queue."""

    async def late_loss(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0.05)
        raise ReplicaLost("gone")
        yield

    first_only(router, late_loss)
    await run(a_generation(router))
    first, second = [request.waited_s for _, request in router.calls.requests]
    assert 0.0 <= first <= second - 0.05


async def test_a_stream_that_ends_without_finish_reason_is_a_lost_replica(router: RouterUnderTest) -> None:
    async def short(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        yield Delta(text_of(0), (100,), 0)

    first_only(router, short)
    assert await run(a_generation(router)) == EXPECTED


async def test_a_stream_that_ends_before_the_last_answer_has_is_a_lost_replica(
    router: RouterUnderTest,
) -> None:
    async def first_answer_only(
        request: GenerateRequest, replica_id: ReplicaId
    ) -> AsyncGenerator[Delta, None]:
        async for delta in count_several(request, replica_id):
            if request.attempt or delta.choice == 0:
                yield delta

    router.follow(first_answer_only)
    finished = [d.choice async for d in a_generation(router, n=2).deltas() if d.finish_reason is not None]
    assert sorted(finished) == [0, 1]
    assert len(router.calls.requests) == 2


async def test_when_all_are_busy_the_client_hears_busy(router: RouterUnderTest) -> None:
    router.follow(failing(QueueFull(1, 1)))
    with pytest.raises(QueueFull):
        await run(a_generation(router))
    assert len({replica_id for replica_id, _ in router.calls.requests}) == 3


async def test_a_failing_forward_is_tried_once_more(router: RouterUnderTest) -> None:
    router.follow(failing(ForwardFailed("x")))
    with pytest.raises(ForwardFailed):
        await run(a_generation(router))
    assert len(router.calls.requests) == 2


@pytest.mark.parametrize("error", [PromptTooLong(9, 8), DeadlineExceeded(1, 2), LeftUnread(9, 8)])
async def test_what_no_replica_would_do_better_is_not_retried(
    router: RouterUnderTest, error: ServingError
) -> None:
    router.follow(failing(error))
    with pytest.raises(type(error)):
        await run(a_generation(router))
    assert len(router.calls.requests) == 1


async def test_without_another_replica_a_lost_one_means_no_replica() -> None:
    async with RouterUnderTest(num_replicas=1) as alone:
        alone.follow(failing(ReplicaLost("gone")))
        with pytest.raises(NoReplica):
            await run(a_generation(alone))


async def test_who_accepted_is_excluded_even_if_it_was_not_the_first_rank(router: RouterUnderTest) -> None:
    async def accepted_by_the_last(request: GenerateRequest, _: ReplicaId) -> AsyncGenerator[Delta, None]:
        router.parts.routing.routed(request.request_id, request.ranks[-1])
        router.parts.routing.replica_lost(request.ranks[-1])  # Serve tells of the death before we see it
        raise ReplicaLost("gone")
        yield

    first_only(router, accepted_by_the_last)
    assert await run(a_generation(router)) == EXPECTED
    (_, first), (_, second) = router.calls.requests
    assert second.excluded_replicas == {first.ranks[-1]}


@pytest.mark.parametrize("deltas_taken", [0, 1, 3])
async def test_closing_it_cancels_the_call_and_releases_the_booking(
    router: RouterUnderTest, deltas_taken: int
) -> None:
    deltas = a_generation(router).deltas()
    for _ in range(deltas_taken):
        await anext(deltas)
    await deltas.aclose()
    assert router.calls.running == 0
    assert router.calls.cancelled == (1 if deltas_taken else 0)
    assert_nothing_in_flight(router)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ReplicaLost("gone"), NoReplica),  # nobody is left, and it was no one's doing
        (QueueFull(1, 1), QueueFull),
        (ForwardFailed("x"), ForwardFailed),
        (ValueError("bug"), ValueError),
    ],
)
async def test_whatever_happens_nothing_stays_booked(
    router: RouterUnderTest, error: Exception, seen: type[Exception]
) -> None:
    router.follow(failing(error, 1))
    with pytest.raises(seen):
        await run(a_generation(router))
    assert_nothing_in_flight(router)
