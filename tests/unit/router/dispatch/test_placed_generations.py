"""A generation waits for its placement, and what is said of the waiting and the refused goes with it."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from cache.block_hash import BlockHasher
from cache.errors import DeadlineExceeded, QueueFull
from cache.events import Load, StepTimeModel
from cache.messages import SamplingParams
from cache.types import ReplicaId, RequestId
from router.dispatch.generation import Generation
from router.dispatch.job import Job
from router.errors import AllBusy
from tests.fakes.generations import failing
from tests.fakes.http import FINGERPRINT, RouterUnderTest, text_of

HASHER = BlockHasher(FINGERPRINT)
PROMPT = array("i", range(1, 14))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def generation(router: RouterUnderTest, **fields: Any) -> Generation:
    hashes = tuple(HASHER.chain(HASHER.root(), PROMPT))
    job = Job(RequestId("r"), PROMPT, hashes, SamplingParams(max_tokens=8), seed=1, **fields)
    return router.parts.dispatcher.start(job)


async def text(generation: Generation) -> str:
    return "".join([delta.text async for delta in generation.deltas()])


def say(router: RouterUnderTest, replica: ReplicaId, queued: int) -> None:
    model = StepTimeModel(0.0, 0.01, 0.0, 0.0)
    router.parts.routing.on_load(replica, Load(queued_uncached_tokens=queued, num_waiting=1, step_time=model))


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_generations_come_out_the_same(binding: str) -> None:
    async with RouterUnderTest(num_replicas=2, binding=binding) as router:
        assert await text(generation(router)) == "".join(map(text_of, range(8)))
        assert router.parts.routing.statistics().in_flight == 0


async def test_a_generation_waits_for_its_replica_and_a_closed_one_leaves_nothing() -> None:
    async with RouterUnderTest(num_replicas=1, binding="late") as router:
        [replica] = router.replicas
        say(router, replica, 500)
        waiting = asyncio.create_task(text(generation(router)))
        await turns()
        assert router.parts.dispatcher.placer.num_held == 1
        assert router.calls.requests == []
        say(router, replica, 0)
        assert await asyncio.wait_for(waiting, 20) == "".join(map(text_of, range(8)))
        assert router.metric("warmpath_held_seconds_count") == 1

        say(router, replica, 500)
        gone = asyncio.create_task(text(generation(router)))
        await turns()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert router.parts.dispatcher.placer.num_held == 0
        assert router.parts.routing.statistics().in_flight == 0


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_what_is_left_of_the_deadline_travels_with_the_request(binding: str) -> None:
    async with RouterUnderTest(num_replicas=1, binding=binding, request_timeout_s=300.0) as router:
        await text(generation(router))
        await text(generation(router, timeout_s=50.0))
        left = [request.deadline_s for _, request in router.calls.requests]
        assert all(seconds is not None for seconds in left)
        assert 250.0 < (left[0] or 0.0) <= 300.0
        assert 0.0 < (left[1] or 0.0) <= 50.0


async def test_a_deadline_that_passes_before_it_is_sent_is_told() -> None:
    async with RouterUnderTest(num_replicas=1, binding="late", request_timeout_s=0.02) as router:
        full = Load(num_waiting=256, step_time=StepTimeModel(0.0, 0.01, 0.0, 0.0))
        router.parts.routing.on_load(router.replicas[0], full)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(text(generation(router)), 20)
        assert router.calls.requests == []
        assert router.parts.routing.statistics().in_flight == 0


async def test_deadlines_are_off_unless_somebody_sets_them() -> None:
    async with RouterUnderTest(num_replicas=1) as router:
        await text(generation(router))
        assert [request.deadline_s for _, request in router.calls.requests] == [None]


@pytest.mark.parametrize("peers", [1, 2])
async def test_what_waits_here_travels_with_who_goes(peers: int) -> None:
    """Replicas do not see what is held, and tell whoever decides how many of them there are."""
    async with RouterUnderTest(num_replicas=2, binding="late") as router:
        routing, placer = router.parts.routing, router.parts.dispatcher.placer
        routing._weighing._peers = lambda: (0, peers)
        for replica in router.replicas:
            say(router, replica, 500)
        jobs = []
        for name, first in (("a", 0), ("b", 100), ("c", 200)):
            prompt = array("i", range(first, first + len(PROMPT)))  # nothing in common
            hashes = tuple(HASHER.chain(HASHER.root(), prompt))
            jobs.append(Job(RequestId(name), prompt, hashes, SamplingParams(max_tokens=8), seed=1))
        waiting = [asyncio.create_task(text(router.parts.dispatcher.start(job))) for job in jobs]
        await turns()
        each_s = len(PROMPT) * 0.01
        assert placer.held_s == pytest.approx(3 * each_s)
        say(router, router.replicas[0], 0)
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        told = [request.held_s for _, request in router.calls.requests]
        assert told == pytest.approx([left * each_s * peers / 2 for left in (2, 1, 0)])
        assert placer.held_s == 0.0


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_what_was_refused_travels_with_who_goes(binding: str) -> None:
    """One that no queue may delay, refused, and then two that go: in seconds of the replica's time."""
    async with RouterUnderTest(num_replicas=1, binding=binding, max_wait_s=1.0) as router:
        dispatcher = router.parts.dispatcher
        say(router, router.replicas[0], 500)
        with pytest.raises(AllBusy):
            await text(generation(router))
        say(router, router.replicas[0], 0)
        for name, first in (("a", 100), ("b", 200)):
            prompt = array("i", range(first, first + len(PROMPT)))  # nothing in common
            hashes = tuple(HASHER.chain(HASHER.root(), prompt))
            job = Job(RequestId(name), prompt, hashes, SamplingParams(max_tokens=8), seed=1)
            await text(dispatcher.start(job))
        told = [request.refused_ratio for _, request in router.calls.requests]
        assert told == pytest.approx([1.0, 0.5], rel=0.05)
        assert dispatcher.placer.refused_ratio == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_what_engines_refuse_is_refused_work(binding: str) -> None:
    """It counted as placed, so a fleet that turned everybody away asked for no replica more."""
    async with RouterUnderTest(num_replicas=2, binding=binding) as router:
        placer = router.parts.dispatcher.placer
        for replica in router.replicas:
            say(router, replica, 0)
        await text(generation(router))
        assert placer.refused_ratio == 0.0
        router.follow(failing(QueueFull(1, 1)))
        prompt = array("i", range(100, 100 + len(PROMPT)))  # nothing in common
        hashes = tuple(HASHER.chain(HASHER.root(), prompt))
        with pytest.raises(QueueFull):
            await text(
                router.parts.dispatcher.start(
                    Job(RequestId("refused"), prompt, hashes, SamplingParams(max_tokens=8), seed=1)
                )
            )
        assert placer.refused_ratio == pytest.approx(1.0, rel=0.05)


async def test_at_once_nothing_waits_here() -> None:
    async with RouterUnderTest(num_replicas=1, binding="at_once") as router:
        await text(generation(router))
        assert [request.held_s for _, request in router.calls.requests] == [0.0]
