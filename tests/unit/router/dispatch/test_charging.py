"""Whom a generation's tokens are charged to, and how long that is kept."""

from __future__ import annotations

import weakref
from contextlib import aclosing

import pytest

from cache.errors import (
    AdmissionFailed,
    ForwardFailed,
    PromptTooLong,
    QueueFull,
    RequestRefused,
    ServingError,
)
from cache.events import Load, RequestEnded
from router.errors import AllBusy, NoReplica, ReplicaLost, RoutingError
from tests.fakes.generations import (
    a_generation,
    count_several,
    failing,
    first_only,
    run,
)
from tests.fakes.http import RouterUnderTest


async def test_what_is_computed_for_nobody_is_still_its_tenants(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn at the Router went by what was read."""
    served: list[tuple[str, int]] = []
    placer = router.parts.dispatcher.placer
    monkeypatch.setattr(placer, "served", lambda tenant, num_tokens, _: served.append((tenant, num_tokens)))
    spent: list[int] = []
    generation = a_generation(router, tenant="acme", spend=spent.append)
    async with aclosing(generation.deltas()) as deltas:
        await anext(deltas)
    ((replica_id, request),) = router.calls.requests
    ended = RequestEnded(request.request_id, request.attempt, 8)
    router.parts.routing.on_load(replica_id, Load(ended=(ended,)))
    assert (served, spent) == ([("acme", 2), ("acme", 6)], [2, 6])
    assert len(router.parts.dispatcher.accounts) == 0


@pytest.mark.parametrize("read_on", [False, True])
async def test_what_is_told_of_while_it_is_read_is_its_tenants_once(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, read_on: bool
) -> None:
    served: list[int] = []
    monkeypatch.setattr(router.parts.dispatcher.placer, "served", lambda _, num, __: served.append(num))
    spent: list[int] = []
    async with aclosing(a_generation(router, spend=spent.append).deltas()) as deltas:
        await anext(deltas)
        ((replica_id, request),) = router.calls.requests
        router.parts.routing.on_load(replica_id, Load(ended=(RequestEnded(request.request_id, 0, 8),)))
        while read_on and await anext(deltas, None) is not None:
            pass
    assert (served, spent) == ([8], [2, 6])


async def test_each_answer_may_have_as_many_tokens_as_were_asked_for(router: RouterUnderTest) -> None:
    """Also where one of them has been read to its end."""
    router.follow(count_several)
    spent: list[int] = []
    num_read = 0
    async with aclosing(a_generation(router, n=2, spend=spent.append).deltas()) as deltas:
        async for delta in deltas:
            num_read += len(delta.token_ids)
            if delta.finish_reason is not None:
                break
    ((replica_id, request),) = router.calls.requests
    router.parts.routing.on_load(replica_id, Load(ended=(RequestEnded(request.request_id, 0, 16),)))
    assert 0 < num_read < 16
    assert sum(spent) == 16


async def test_of_several_attempts_the_last_is_charged_beside_what_was_read(router: RouterUnderTest) -> None:
    first_only(router, failing(ReplicaLost("gone"), 1))
    spent: list[int] = []
    async with aclosing(a_generation(router, spend=spent.append).deltas()) as deltas:
        for _ in range(2):
            await anext(deltas)
    replica_id, request = router.calls.requests[-1]
    router.parts.routing.on_load(replica_id, Load(ended=(RequestEnded(request.request_id, 1, 6),)))
    assert spent == [2, 2, 4]


async def test_an_account_keeps_no_prompt(router: RouterUnderTest) -> None:
    """An engine may tell of it for a minute yet, and the whole generation was kept for that."""
    generation = a_generation(router)
    async with aclosing(generation.deltas()) as deltas:
        await anext(deltas)
    assert len(router.parts.dispatcher.accounts) == 1
    kept = weakref.ref(generation)
    del generation, deltas
    assert kept() is None


@pytest.mark.parametrize(
    "error", [QueueFull(1, 1), PromptTooLong(9, 8), NoReplica(), AllBusy(1, 1.0), AdmissionFailed("x")]
)
async def test_what_no_engine_has_taken_in_leaves_no_account(
    router: RouterUnderTest, error: ServingError
) -> None:
    """No engine tells of it, and a refusal is what there are most of when there is least room."""
    router.follow(failing(error))
    with pytest.raises((RequestRefused, RoutingError)):
        await run(a_generation(router))
    assert router.calls.requests
    assert len(router.parts.dispatcher.accounts) == 0


@pytest.mark.parametrize("error", [ReplicaLost("gone"), ForwardFailed("x"), RequestRefused("of its own")])
async def test_what_an_engine_may_have_begun_on_it_may_tell_of_yet(
    router: RouterUnderTest, error: ServingError
) -> None:
    router.follow(failing(error))
    with pytest.raises((RequestRefused, RoutingError)):
        await run(a_generation(router))
    assert len(router.parts.dispatcher.accounts) == 1


async def test_who_reads_to_the_end_leaves_no_account(router: RouterUnderTest) -> None:
    await run(a_generation(router))
    assert len(router.parts.dispatcher.accounts) == 0
