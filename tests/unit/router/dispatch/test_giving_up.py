"""When a generation is given up: its deadline, its attempts and the replicas that died under it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

import pytest

from cache.errors import (
    DeadlineExceeded,
    HandedOver,
    PiecesLost,
)
from cache.events import Load
from cache.messages import Delta, GenerateRequest, SamplingParams
from cache.types import ReplicaId, RequestId
from router.dispatch import deadline
from router.dispatch.job import Job
from router.errors import NoReplica, ReplicaLost, TooManyDeaths
from tests.fakes.generations import (
    EXPECTED,
    PROMPT,
    a_generation,
    assert_nothing_in_flight,
    failing,
    run,
)
from tests.fakes.http import MODEL, RouterUnderTest, counting, error_of, events_of, text_of


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_who_waits_for_room_again_waits_no_longer_than_its_deadline(binding: str) -> None:
    async with RouterUnderTest(num_replicas=2, binding=binding) as router:

        async def lose_for_good(request: GenerateRequest, name: ReplicaId) -> AsyncGenerator[Delta, None]:
            async for delta in counting(request, name):
                yield delta
                for other in router.parts.routing.replicas:
                    router.parts.routing.on_load(other, Load(num_waiting=10**6))
                raise ReplicaLost("gone")

        router.follow(lose_for_good)
        came_at = router.parts.dispatcher.clock() - 5.0
        with pytest.raises(DeadlineExceeded) as caught:
            await run(a_generation(router, timeout_s=5.1, came_at=came_at))
        assert caught.value.deadline_s == pytest.approx(5.1)
        assert caught.value.waited_s >= 5.1
        assert router.parts.dispatcher.placer.num_held == 0
        assert_nothing_in_flight(router)


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_a_deadline_that_passed_before_placement_is_told_from_arrival(binding: str) -> None:
    """It was told from when the prompt was tokenized, and could be negative."""
    async with RouterUnderTest(binding=binding) as router:
        came_at = router.parts.dispatcher.clock() - 5.0
        with pytest.raises(DeadlineExceeded) as caught:
            await run(a_generation(router, timeout_s=2.0, came_at=came_at))
    assert caught.value.deadline_s == pytest.approx(2.0)
    assert caught.value.waited_s >= 5.0


@pytest.mark.parametrize("prefill_s", [None, 3.0])
async def test_a_deadline_that_passed_at_a_replica_is_told_from_arrival(
    router: RouterUnderTest, prefill_s: float | None
) -> None:
    """A replica counts from when it was asked, what was left then."""

    async def late(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        assert request.deadline_s is not None
        raise DeadlineExceeded(request.deadline_s, request.deadline_s + 0.25, prefill_s)
        yield

    router.follow(late)
    came_at = router.parts.dispatcher.clock() - 5.0
    with pytest.raises(
        DeadlineExceeded, match=r"60\.250 s after arrival, the deadline was 60\.000 s"
    ) as caught:
        await run(a_generation(router, timeout_s=60.0, came_at=came_at))
    assert caught.value.prefill_s == prefill_s


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Takes the event loop's timers on by seconds. A short deadline could pass before it is looked at."""

    def leap(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time
        monkeypatch.setattr(loop, "time", lambda: before() + seconds)

    return leap


@pytest.mark.parametrize("binding", ["late", "at_once"])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_replica_that_says_nothing_is_not_awaited_after_the_deadline(
    leap: Callable[[float], None], binding: str, has_begun: bool
) -> None:
    """A hung engine, or one that cannot be reached; also a call that Serve has not assigned."""
    deltas = [Delta("a", (1,), 0)] if has_begun else []
    async with RouterUnderTest(binding=binding) as router, asyncio.timeout(70):
        router.answer_with(*deltas, then_hang=True, meanwhile=lambda: leap(55.0 + deadline.GRACE_S))
        generation = a_generation(router, timeout_s=60.0, came_at=router.parts.dispatcher.clock() - 5.0)
        with pytest.raises(DeadlineExceeded) as caught:
            await run(generation)
        assert caught.value.deadline_s == pytest.approx(60.0)
        assert caught.value.waited_s >= 60.0
        assert (router.calls.running, router.calls.cancelled) == (0, 1)
        assert len(router.calls.requests) == 1
        assert_nothing_in_flight(router)


async def test_the_engines_own_word_for_a_deadline_comes_first(
    router: RouterUnderTest, leap: Callable[[float], None]
) -> None:
    """It knows more: what the prompt would have taken. It looks between two steps."""

    async def says_so(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
        assert request.deadline_s is not None
        leap(60.0 + deadline.GRACE_S / 2)
        await asyncio.sleep(0.01)  # the loop looks at its timers
        raise DeadlineExceeded(request.deadline_s, request.deadline_s + 0.5, 3.0)
        yield

    router.follow(says_so)
    with pytest.raises(DeadlineExceeded) as caught:
        await run(a_generation(router, timeout_s=60.0))
    assert caught.value.prefill_s == 3.0


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "several"])
async def test_a_client_of_a_silent_replica_is_told_soon_after_its_deadline(
    router: RouterUnderTest, leap: Callable[[float], None], prompt: object
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 5}
    for fields, deltas in (({}, []), ({"stream": True}, [Delta("a", (1,), 0)])):
        router.answer_with(*deltas, then_hang=True, meanwhile=lambda: leap(60.0 + deadline.GRACE_S))
        async with asyncio.timeout(140):
            answer = await router.client.post(
                "/v1/completions", json=body | fields, headers={"x-warmpath-timeout": "60"}
            )
        if not fields:
            assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
        else:
            last = json.loads(events_of(answer.content)[-1])
            assert last["error"]["code"] == "deadline_exceeded"
        assert router.calls.running == 0
        assert_nothing_in_flight(router)
    assert router.metric("warmpath_requests_total", endpoint="completions", outcome="client_deadline") == 2


async def test_deltas_that_are_always_lost_end_in_an_error() -> None:
    async with RouterUnderTest(num_replicas=2, max_attempts=3) as router:
        router.follow(failing(PiecesLost()))
        with pytest.raises(PiecesLost):
            await run(a_generation(router))
        assert len(router.calls.requests) == 3


async def test_a_request_under_which_too_many_replicas_die_is_refused(router: RouterUnderTest) -> None:
    router.follow(failing(ReplicaLost("gone")))
    with pytest.raises(TooManyDeaths):
        await run(a_generation(router))
    assert len(router.calls.requests) == 3


@pytest.mark.parametrize("num_deltas", [1, 3])
async def test_what_kills_at_a_certain_token_is_refused_where_it_gets_no_further(num_deltas: int) -> None:
    """The first replica dies after some tokens; the one that goes on from there, before another."""

    async def poison(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        left = num_deltas if request.attempt == 0 else 0
        async for delta in failing(ReplicaLost("gone"), left)(request, replica_id):
            yield delta

    async with RouterUnderTest(num_replicas=4, max_attempts=4, max_deaths=2) as fleet:
        fleet.follow(poison)
        with pytest.raises(TooManyDeaths, match="when 2 replicas died"):
            await run(a_generation(fleet))
        assert len(fleet.calls.requests) == 2


async def test_a_stream_that_goes_on_between_deaths_has_all_its_attempts() -> None:
    """Who kills replica after replica has little to do with the streams that run there."""
    async with RouterUnderTest(num_replicas=4, max_attempts=3, max_deaths=2) as fleet:

        async def dies(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
            script = failing(ReplicaLost("gone"), 1) if request.attempt < 2 else counting
            async for delta in script(request, replica_id):
                yield delta

        fleet.follow(dies)
        assert await run(a_generation(fleet)) == EXPECTED
        assert len(fleet.calls.requests) == 3


async def test_a_stream_whose_attempts_have_all_died_is_told_of_the_deaths() -> None:
    async with RouterUnderTest(num_replicas=4, max_attempts=3, max_deaths=2) as fleet:
        fleet.follow(failing(ReplicaLost("gone"), 1))
        with pytest.raises(TooManyDeaths, match="when 3 replicas died"):
            await run(a_generation(fleet))
        assert len(fleet.calls.requests) == 3


async def test_attempts_are_bounded(router: RouterUnderTest) -> None:
    async with RouterUnderTest(num_replicas=5, max_attempts=2, max_deaths=5) as small:
        small.follow(failing(ReplicaLost("gone")))
        with pytest.raises(NoReplica):
            await run(a_generation(small))
        assert len(small.calls.requests) == 2


async def test_a_stream_outlives_more_replicas_that_leave_than_it_has_attempts() -> None:
    """A rolling update takes one replica after the other, and a long stream may meet all of them."""
    async with RouterUnderTest(num_replicas=6, max_attempts=2, max_deaths=2) as fleet:

        async def leave(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
            script = failing(HandedOver(), 1) if request.attempt < 5 else counting
            async for delta in script(request, replica_id):
                yield delta

        fleet.follow(leave)
        job = Job(RequestId("r"), PROMPT, (), SamplingParams(max_tokens=20), seed=1)
        generation = fleet.parts.service._dispatcher.start(job)
        assert await run(generation) == "".join(map(text_of, range(20)))
        assert len({replica_id for replica_id, _ in fleet.calls.requests}) == 6
        assert fleet.metric("warmpath_retries_total", why="handed_over", phase="mid_stream") == 5
