"""Copies of hot prefixes, as they are sent: no request waits for them, and none fails with them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import pytest

from cache.errors import QueueFull
from cache.messages import Delta, FinishReason, GenerateRequest
from router.errors import NoReplica, ReplicaLost
from router.placement.decision import RouteQuery
from router.prefixes.hot_copies import LIMIT_S, HotCopies, HotCopyStatistics
from tests.fakes.router import BLOCK_SIZE, chain, query, replica_id
from tests.fakes.routing import RoutingBench

A, B = replica_id(0), replica_id(1)
PREFIX = 64  # blocks
Answer = Callable[[GenerateRequest], AsyncGenerator[Delta, None]]


class Replicas:
    """Answer with what they are told to."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[GenerateRequest] = []
        self.was_asked = asyncio.Event()
        self.num_closed = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.was_asked.set()
        try:
            async for delta in self._answer(request):
                yield delta
        finally:
            self.num_closed += 1


async def computed(_: GenerateRequest) -> AsyncGenerator[Delta, None]:
    yield Delta("", (), 2 * BLOCK_SIZE, FinishReason.LENGTH)


async def never(_: GenerateRequest) -> AsyncGenerator[Delta, None]:
    await asyncio.Event().wait()
    yield Delta("", (), 0, FinishReason.LENGTH)


Charges = list[tuple[str, int, float]]


@pytest.fixture
def charges() -> Charges:
    """Tenants, tokens, shares, as the Router's turns hear of them."""
    return []


class Order(Protocol):
    def __call__(self, replicas: Replicas) -> tuple[RoutingBench, HotCopies]: ...


@pytest.fixture
def order(bench: RoutingBench, charges: Charges) -> Order:
    """Copies made by these replicas, and one of them wanted at B."""

    def ordered(replicas: Replicas) -> tuple[RoutingBench, HotCopies]:
        copies = HotCopies(
            bench.routing, replicas, lambda: (3.0, 0.5), lambda *charged: charges.append(charged)
        )
        system = chain("system", PREFIX)
        bench.say(A, stored=system)
        for index in range(20):
            asked = query(f"user{index}", 1)
            bench.routing.release(bench.routing.choose(_behind(system, asked)).request_id)
        bench.say(A, queued_uncached_tokens=500, num_waiting=1)
        bench.say(B)
        bench.routing.choose(_behind(system, query("hot", 1)))
        return bench, copies

    return ordered


@pytest.fixture
def bench() -> RoutingBench:
    return RoutingBench()


def _behind(system: list[bytes], asked: RouteQuery) -> RouteQuery:
    tokens = array("i", range((PREFIX + 1) * BLOCK_SIZE + 1))
    hashes = [*system, *asked.block_hashes]
    return asked._replace(
        block_hashes=hashes,
        num_prompt_tokens=len(tokens),
        token_ids=tokens,
        tenant="alice",
        share=2.0,
        priority=3,
    )


async def until_over(bench: RoutingBench) -> None:
    async with asyncio.timeout(10):
        while bench.in_flight(B):  # noqa: ASYNC110  # nor has it an event
            await asyncio.sleep(0)


async def test_the_prefix_alone_is_sent_for_the_cache_and_to_that_replica_only(order: Order) -> None:
    replicas = Replicas(computed)
    bench, copies = order(replicas)
    await until_over(bench)
    [request] = replicas.requests
    assert request.for_cache
    assert request.pin is None
    assert request.ranks == (B,)
    assert request.excluded_replicas == {A}
    assert request.token_ids == array("i", range(PREFIX * BLOCK_SIZE))
    assert request.num_prompt_tokens == len(request.block_hashes) * BLOCK_SIZE == PREFIX * BLOCK_SIZE
    assert (request.tenant, request.share, request.priority) == ("alice", 2.0, 3)
    assert (request.held_s, request.refused_ratio, request.deadline_s) == (3.0, 0.5, LIMIT_S)
    assert copies.statistics() == HotCopyStatistics(1, 0, (PREFIX - 2) * BLOCK_SIZE)
    assert bench.in_flight(A) == 1, "the request itself is where it was"


async def test_it_is_charged_to_its_tenant_as_its_engine_does(order: Order, charges: Charges) -> None:
    """Engines charged it and Routers did not: they disagreed on whose turn it was."""
    bench, _ = order(Replicas(computed))
    await until_over(bench)
    assert charges == [("alice", (PREFIX - 2) * BLOCK_SIZE, 2.0)]


async def _lost(_: GenerateRequest) -> AsyncGenerator[Delta, None]:
    raise ReplicaLost("it is gone")
    yield Delta("", (), 0, None)


async def _full(_: GenerateRequest) -> AsyncGenerator[Delta, None]:
    raise QueueFull(8, 8)
    yield Delta("", (), 0, None)


async def _gone(_: GenerateRequest) -> AsyncGenerator[Delta, None]:
    raise NoReplica(2, 1)
    yield Delta("", (), 0, None)


async def _cut(_: GenerateRequest) -> AsyncGenerator[Delta, None]:
    return
    yield Delta("", (), 0, None)


@pytest.mark.parametrize("answer", [_lost, _full, _gone, _cut])
async def test_one_that_fails_is_given_back_and_not_made_again(order: Order, answer: Answer) -> None:
    replicas = Replicas(answer)
    bench, copies = order(replicas)
    await until_over(bench)
    assert copies.statistics() == HotCopyStatistics(0, 1, 0)
    assert len(replicas.requests) == 1
    assert B in bench.routing.replicas
    bench.say(A, queued_uncached_tokens=500, num_waiting=1)
    bench.say(B)
    bench.routing.choose(_behind(chain("system", PREFIX), query("hotter", 1)))
    assert not bench.in_flight(B), "it was tried again at once"


async def test_what_is_being_made_when_the_router_closes_is_cancelled_and_given_back(order: Order) -> None:
    replicas = Replicas(never)
    bench, copies = order(replicas)
    await replicas.was_asked.wait()
    await copies.aclose()
    assert replicas.num_closed == 1
    assert not bench.in_flight(B)
    assert copies.statistics() == HotCopyStatistics(0, 0, 0)
    await copies.aclose()
    bench.say(A, queued_uncached_tokens=500, num_waiting=1)
    bench.say(B)
    bench.routing.choose(_behind(chain("system", PREFIX), query("hotter", 1)))
    assert len(replicas.requests) == 1, "one was wanted after that"
