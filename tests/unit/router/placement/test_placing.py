"""Waiting for a placement on an event loop: reports and timers wake it, and whoever leaves leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cache.errors import DeadlineExceeded
from cache.events import Load, StepTimeModel
from cache.types import RequestId
from router.errors import AllBusy, NoReplica, RouterLeaves
from router.placement.decision import Admittance, Decision, RouteQuery
from router.placement.placing import LatePlacer, PromptPlacer, make_placer
from router.placement.routing import Routing
from tests.fakes.router import BLOCK_SIZE, config, info, load, query, replica_id

A = replica_id(0)


class Router:
    def __init__(self, **settings: Any) -> None:
        self.routing = Routing(config(binding="late", **settings))
        self.routing.update_replicas({A: info()})
        self.placer = make_placer(config(binding="late", **settings), self.routing, time.monotonic)
        assert isinstance(self.placer, LatePlacer)
        self.report(busy=True)

    def report(self, *, busy: bool, **changes: Any) -> None:
        tokens = 60_000 if busy else 0  # seven seconds of the ten that one may wait
        self.routing.on_load(A, load(queued_uncached_tokens=tokens, num_waiting=int(busy), **changes))

    def ask(self, name: str = "q", **times: Any) -> asyncio.Task[Any]:
        asked = {"since": time.monotonic(), "deadline": None, **times}
        return asyncio.create_task(self.placer.place(query(name), **asked))


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    under_test = Router()
    yield under_test
    under_test.placer.close()
    under_test.placer.close()
    assert under_test.placer.num_held == 0


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_report_lets_it_go(router: Router) -> None:
    task = router.ask()
    await turns()
    assert not task.done()
    assert router.placer.num_held == 1
    router.report(busy=False)
    placement = await asyncio.wait_for(task, 20)
    assert placement.replica_id == A
    assert router.routing.statistics().in_flight == 1
    assert router.routing.release(placement.request_id)


async def test_time_lets_it_go(router: Router) -> None:
    """20 ms more than the limit are queued; nobody reports anything."""
    router.routing.on_load(A, Load(queued_uncached_tokens=12, step_time=StepTimeModel(0.0, 0.01, 0.0, 0.0)))
    began = time.monotonic()
    await asyncio.wait_for(router.ask(), 20)
    assert time.monotonic() - began >= 0.015


async def test_what_ends_elsewhere_frees_its_replica() -> None:
    router = Router()
    router.report(busy=False)
    booked = router.routing.choose(query("ahead", 1000))
    task = router.ask()
    await turns()
    assert not task.done()
    router.routing.release(booked.request_id)
    await asyncio.wait_for(task, 20)
    router.placer.close()


async def test_a_client_that_leaves_is_held_no_longer(router: Router) -> None:
    task = router.ask()
    await turns()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert router.placer.num_held == 0
    router.report(busy=False)
    await turns()
    assert router.routing.statistics().in_flight == 0


async def test_a_client_that_leaves_in_the_moment_of_booking_can_release_it(router: Router) -> None:
    task = router.ask()
    await turns()
    router.report(busy=False)
    router.placer._poll()  # type: ignore[attr-defined]
    assert router.routing.statistics().in_flight == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert router.routing.release(RequestId("q"))
    assert router.routing.statistics().in_flight == 0


async def test_errors_come_to_who_asked(router: Router) -> None:
    now = time.monotonic()
    late = router.ask("late", since=now - 3.0, deadline=now)
    hopeless = router.ask("hopeless", deadline=now + 3.0)
    with pytest.raises(AllBusy):
        await asyncio.wait_for(hopeless, 20)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late, 20)
    stranded = router.ask("stranded")
    await turns()
    router.routing.replica_lost(A)
    with pytest.raises(NoReplica):
        await asyncio.wait_for(stranded, 20)


async def test_a_bug_in_looking_whether_one_stays_is_no_others(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who left before it in the same poll is booked already: without its placement it would wait for ever."""
    tasks = [router.ask(name) for name in ("first", "second", "third")]
    await turns()
    assert router.placer.num_held == 3
    stays = router.placer._held._is_bound_to_stay  # type: ignore[attr-defined]

    def fail_for_one(held: Any, *arguments: Any) -> bool:
        if held.request_id == "second":
            raise RuntimeError("broken")
        return bool(stays(held, *arguments))

    monkeypatch.setattr(router.placer._held, "_is_bound_to_stay", fail_for_one)  # type: ignore[attr-defined]
    router.report(busy=False)
    first, second, third = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert isinstance(second, RuntimeError)
    assert (first.replica_id, third.replica_id) == (A, A)
    assert router.placer.num_held == 0


async def test_who_came_when_a_poll_failed_leaves_nothing(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(router.placer._held, "poll", fail)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="broken"):
        await router.ask()
    assert router.placer.num_held == 0
    assert not router.placer._futures  # type: ignore[attr-defined]


async def test_a_bug_that_one_meets_is_no_others(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither theirs who left before it in the same look, nor theirs behind it."""
    tasks = [router.ask(name) for name in ("first", "met", "last")]
    await turns()
    weigh = router.routing.weigh

    def weigh_or_fail(asked: RouteQuery, **how: Any) -> Decision:
        if asked.request_id == "met":
            raise KeyError("a policy forgot a replica")
        return weigh(asked, **how)

    monkeypatch.setattr(router.routing, "weigh", weigh_or_fail)
    router.report(busy=False)
    async with asyncio.timeout(5.0):
        answers: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    first, met, last = answers
    assert isinstance(met, KeyError)
    assert first.replica_id == last.replica_id == A


async def test_the_queue_is_bounded() -> None:
    router = Router(max_held_per_replica=2)
    tasks = [router.ask(str(number)) for number in range(3)]
    await turns()
    with pytest.raises(AllBusy):
        await tasks[2]
    router.placer.close()
    for task in tasks[:2]:
        with pytest.raises(RouterLeaves):
            await task


async def test_at_once_means_at_once() -> None:
    routing = Routing(config(binding="at_once"))
    placer = make_placer(config(binding="at_once"), routing, time.monotonic)
    assert isinstance(placer, PromptPlacer)
    routing.update_replicas({A: info()})
    routing.on_load(A, load(queued_uncached_tokens=60_000))
    assert (await placer.place(query("q"), since=0.0, deadline=None)).replica_id == A
    placer.close()


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_who_lost_its_replica_waits_for_room_and_for_nothing_once_it_is_closed(binding: str) -> None:
    settings = config(binding=binding)
    routing = Routing(settings)
    placer = make_placer(settings, routing, time.monotonic)
    routing.update_replicas({A: info()})
    routing.on_load(A, load(num_waiting=10**6))
    gone, left = (
        asyncio.create_task(placer.place(query(name, is_again=True), since=0.0, deadline=None))
        for name in ("gone", "left")
    )
    await turns()
    assert placer.num_held == 2
    gone.cancel()
    await turns()
    assert placer.num_held == 1
    placer.close()
    await asyncio.wait([gone, left])
    assert gone.cancelled()
    assert isinstance(left.exception(), RouterLeaves)
    assert placer.num_held == 0
    assert routing.statistics().all_busy == 0


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_who_would_wait_too_long_is_refused(binding: str) -> None:
    settings = config(binding=binding, max_wait_s=2.0)
    routing = Routing(settings)
    placer = make_placer(settings, routing, time.monotonic)
    routing.update_replicas({A: info()})
    routing.on_load(A, load(queued_uncached_tokens=60_000))
    with pytest.raises(AllBusy) as caught:
        await placer.place(query("q"), since=0.0, deadline=None)
    assert caught.value.retry_after_s == pytest.approx(60_000 * (0.0001 + 0.011 / 512) - 2.0, abs=0.1)
    assert routing.statistics().all_busy == 1
    lost = query("its replica was lost", excluded=frozenset({replica_id(1)}), is_again=True)
    again = asyncio.create_task(placer.place(lost, since=0.0, deadline=None))
    await turns()
    assert again.done() is (binding == "at_once")
    assert not again.done() or again.result().replica_id == A
    placer.close()
    await asyncio.gather(again, return_exceptions=True)
    assert routing.statistics().all_busy == 1


@pytest.mark.parametrize("binding", ["at_once", "late"])
async def test_prompts_that_came_together_are_not_refused_for_each_other(binding: str) -> None:
    """A replica that has nothing else to do, and four times the longest wait in one HTTP request: all of it
    was refused, and again whenever it came back. Who comes behind it is asked as ever."""
    settings = config(binding=binding, max_wait_s=2.0, max_held_per_replica=3)
    routing = Routing(settings)
    placer = make_placer(settings, routing, time.monotonic)
    routing.update_replicas({A: info()})
    routing.on_load(A, load())
    together, num_blocks = Admittance(), 8_000 // BLOCK_SIZE  # a second each
    asked = [query(f"{number}", num_blocks, part=1 / 8, admittance=together) for number in range(8)]
    waiting = [asyncio.create_task(placer.place(each, since=0.0, deadline=None)) for each in asked]
    await turns()
    assert placer.num_held == (7 if binding == "late" else 0)
    with pytest.raises(AllBusy):
        await placer.place(query("another", num_blocks), since=0.0, deadline=None)
    assert [task.done() for task in waiting] == [True, *[binding == "at_once"] * 7]
    assert routing.statistics().all_busy == 1
    placer.close()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_at_once_too_a_hopeless_deadline_is_not_waited_for() -> None:
    settings = config(binding="at_once")
    routing = Routing(settings)
    placer = make_placer(settings, routing, time.monotonic)
    routing.update_replicas({A: info()})
    routing.on_load(A, load(queued_uncached_tokens=60_000))
    with pytest.raises(AllBusy):
        await placer.place(query("q"), since=0.0, deadline=time.monotonic() + 3.0)
    placed = await placer.place(query("q"), since=0.0, deadline=time.monotonic() + 30.0)
    assert placed.replica_id == A
