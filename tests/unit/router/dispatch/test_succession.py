"""Streams of a replica that leaves, which a successor is to go on with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cache.errors import (
    DeadlineExceeded,
    HandedOver,
)
from cache.messages import Delta, GenerateRequest, PinLease
from cache.types import PinId, ReplicaId
from router.errors import NoReplica, ReplicaLost
from router.placement import held
from tests.fakes.generations import (
    EXPECTED,
    a_generation,
    assert_nothing_in_flight,
    failing,
    run,
)
from tests.fakes.http import RouterUnderTest, a_replica_info


def _leaving(router: RouterUnderTest) -> None:
    """Who is asked first leaves after one delta, and is off the list when it hands its stream over."""

    async def leave(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        router.parts.routing.update_replicas({})
        async for delta in failing(HandedOver(), 1)(request, replica_id):
            yield delta

    router.follow(leave)


async def _until_handed_over(router: RouterUnderTest) -> None:
    async with asyncio.timeout(5):
        while not router.parts.service._dispatcher.placer.num_held:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)


async def test_a_stream_of_the_only_replica_goes_on_at_its_successor() -> None:
    async with RouterUnderTest(num_replicas=1, max_attempts=1, max_deaths=1) as alone:
        _leaving(alone)
        running = asyncio.create_task(run(a_generation(alone)))
        await _until_handed_over(alone)
        alone.parts.routing.update_replicas({ReplicaId("successor"): a_replica_info()})
        assert await running == EXPECTED
        assert [replica_id for replica_id, _ in alone.calls.requests] == [*alone.replicas, "successor"]
        assert alone.metric("warmpath_retries_total", why="handed_over", phase="mid_stream") == 1
        assert_nothing_in_flight(alone)


async def test_a_stream_whose_successor_does_not_come_ends_in_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "SUCCESSION_S", 0.05)
    async with RouterUnderTest(num_replicas=1) as alone:
        _leaving(alone)
        with pytest.raises(NoReplica):
            await run(a_generation(alone))
        assert len(alone.calls.requests) == 1
        assert_nothing_in_flight(alone)


async def test_bound_at_once_a_stream_of_the_only_replica_waits_for_nobody() -> None:
    async with RouterUnderTest(num_replicas=1, binding="at_once") as alone:
        _leaving(alone)
        with pytest.raises(NoReplica):
            await run(a_generation(alone))
        assert len(alone.calls.requests) == 1
        assert_nothing_in_flight(alone)


async def test_a_successor_is_waited_for_no_longer_than_the_request_may_take() -> None:
    async with RouterUnderTest(num_replicas=1) as alone:
        _leaving(alone)
        with pytest.raises(DeadlineExceeded):
            await run(a_generation(alone, timeout_s=0.2))
        assert_nothing_in_flight(alone)


async def test_a_client_that_goes_while_a_successor_is_waited_for_leaves_nothing() -> None:
    async with RouterUnderTest(num_replicas=1) as alone:
        _leaving(alone)
        running = asyncio.create_task(run(a_generation(alone)))
        await _until_handed_over(alone)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert alone.parts.service._dispatcher.placer.num_held == 0
        assert_nothing_in_flight(alone)


async def test_a_successor_that_dies_counts_as_any_death_does() -> None:
    """Its predecessor left in peace: one death is one, and nobody is waited for any more."""
    async with RouterUnderTest(num_replicas=1, max_attempts=3, max_deaths=2) as alone:
        _leaving(alone)
        running = asyncio.create_task(run(a_generation(alone)))
        await _until_handed_over(alone)
        successor = ReplicaId("successor")
        alone.calls.scripts[successor] = failing(ReplicaLost("gone"))
        alone.parts.routing.update_replicas({successor: a_replica_info()})
        with pytest.raises(NoReplica):
            await running
        assert len(alone.calls.requests) == 2


async def test_a_copy_of_a_pin_that_is_handed_over_waits_for_no_successor() -> None:
    """It was for that replica; whoever wants it chooses another."""
    async with RouterUnderTest(num_replicas=1) as alone:
        _leaving(alone)
        lease = PinLease(PinId("p"), "owner", 60.0, 1, 0.0, 60.0, "router", "")
        with pytest.raises(HandedOver):
            await run(a_generation(alone, pin=lease))
