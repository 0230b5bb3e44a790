"""One story of the whole fleet, whichever Router tells it, also while others hang, die and come back."""

from __future__ import annotations

import asyncio

import pytest

from cache.types import ReplicaId
from router.fleet.engine_series import EngineView
from router.fleet.gather import KEEP_S, MAX_KEPT
from tests.fakes.reports import an_engine_report
from tests.fakes.router import info
from tests.fakes.routers import SomeRouters, Values, value

R = ReplicaId("r1")


def requests(values: Values, router: str) -> float | None:
    return value(values, "warmpath_requests_total", router=router, outcome="ok")


def up(values: Values) -> dict[str, float]:
    return {dict(labels)["router"]: v for (name, labels), v in values.items() if name == "warmpath_router_up"}


def engine_view(**numbers: int) -> EngineView:
    return EngineView(info(), an_engine_report(**numbers))


async def test_whoever_is_asked_tells_of_all() -> None:
    fleet = SomeRouters("a", "b", "c")
    for count, router in enumerate(fleet.routers.values(), 1):
        router.work(count)
    for router in fleet.routers.values():
        values = await router.scrape()
        assert [requests(values, name) for name in "abc"] == [1, 2, 3]
        assert up(values) == {"a": 1, "b": 1, "c": 1}
        assert value(values, "warmpath_seconds_bucket", router="b", le="1.0") == 2


async def test_a_router_alone_tells_of_itself() -> None:
    fleet = SomeRouters("a")
    fleet.routers["a"].work()
    values = await fleet.routers["a"].scrape()
    assert requests(values, "a") == 1
    assert up(values) == {"a": 1}


async def test_a_silent_routers_counters_stand_and_its_gauges_go() -> None:
    """Nobody knows how it is; what it has counted it has counted."""
    fleet = SomeRouters("a", "b")
    a, b = fleet.routers["a"], fleet.routers["b"]
    b.work(5)
    b.in_flight.set(3)
    assert value(await a.scrape(), "warmpath_in_flight", router="b") == 3
    b.is_hung = True
    values = await a.scrape()
    assert (requests(values, "b"), up(values)) == (5, {"a": 1, "b": 0})
    assert value(values, "warmpath_in_flight", router="b") is None
    b.is_hung = False
    b.work()
    values = await a.scrape()
    assert (requests(values, "b"), up(values)["b"]) == (6, 1)


async def test_the_last_word_of_a_silent_router_counts_wherever_it_was_heard() -> None:
    """`c` heard 9 of it and `a` only 7: a scrape of `a` after one of `c` must not go back."""
    fleet = SomeRouters("a", "b", "c")
    a, b, c = fleet.routers.values()
    b.work(7)
    await a.scrape()
    b.work(2)
    await c.scrape()
    b.is_hung = True
    assert requests(await a.scrape(), "b") == 9


async def test_a_newcomer_hears_of_who_is_gone() -> None:
    fleet = SomeRouters("a", "b")
    fleet.routers["b"].work(4)
    await fleet.routers["a"].scrape()
    fleet.stop("b")
    await fleet.routers["a"].scrape()
    values = await fleet.start("b2").scrape()
    assert (requests(values, "b"), up(values)) == (4, {"a": 1, "b": 0, "b2": 1})


async def test_a_restarted_router_is_another_series() -> None:
    """Its counters start at zero under a name of their own: nothing looks like a reset."""
    fleet = SomeRouters("a", "b")
    fleet.routers["b"].work(4)
    await fleet.routers["a"].scrape()
    fleet.stop("b")
    fleet.start("b-again").work()
    values = await fleet.routers["a"].scrape()
    assert (requests(values, "b"), requests(values, "b-again")) == (4, 1)


async def test_who_is_gone_is_forgotten_in_time() -> None:
    fleet = SomeRouters("a", "b", "c")
    a = fleet.routers["a"]
    await a.scrape()
    fleet.stop("b")
    fleet.clock.advance(KEEP_S - 1)
    assert up(await a.scrape()) == {"a": 1, "b": 0, "c": 1}
    fleet.clock.advance(2)
    for router in fleet.routers.values():
        assert up(await router.scrape()) == {"a": 1, "c": 1}


async def test_a_thousand_lives_of_routers_leave_no_more_than_a_few_behind() -> None:
    fleet = SomeRouters("a")
    a = fleet.routers["a"]
    for number in range(1000):
        fleet.start(f"b{number}").work()
        await a.metrics.hear_all()
        fleet.stop(f"b{number}")
        fleet.clock.advance(0.01)
    values = await a.scrape()
    assert len(up(values)) == MAX_KEPT + 1
    assert requests(values, "b999") == 1
    fleet.clock.advance(KEEP_S + 1)
    assert up(await a.scrape()) == {"a": 1}


async def test_a_large_fleet_is_told_of_whole() -> None:
    names = [f"r{number}" for number in range(MAX_KEPT + 10)]
    fleet = SomeRouters(*names)
    assert up(await fleet.routers["r0"].scrape()) == dict.fromkeys(names, 1)


async def test_the_newest_report_of_an_engine_counts_wherever_it_was_heard() -> None:
    """Events reach two Routers milliseconds apart: scraped in turn they must not go back and forth."""
    fleet = SomeRouters("a", "b")
    a, b = fleet.routers.values()
    a.engines = {R: engine_view(number=10, generated_tokens=100)}
    b.engines = {R: engine_view(number=9, generated_tokens=90)}
    for router in (a, b):
        values = await router.scrape()
        assert value(values, "vllm:generation_tokens_total", model_name="m", engine=R) == 100
    a.is_hung = True  # what was heard of it is remembered
    assert value(await b.scrape(), "vllm:generation_tokens_total", model_name="m", engine=R) == 100


async def test_of_two_lives_of_an_engine_the_one_heard_directly_counts() -> None:
    fleet = SomeRouters("a", "b")
    a, b = fleet.routers.values()
    a.engines = {R: engine_view(epoch=2, number=1, generated_tokens=1)}
    b.engines = {R: engine_view(epoch=1, number=99, generated_tokens=99)}
    assert value(await a.scrape(), "vllm:generation_tokens_total", model_name="m", engine=R) == 1


async def test_a_thousand_replicas_that_came_and_went_leave_no_series() -> None:
    """Neither here nor through another Router that has not let go of one yet."""
    fleet = SomeRouters("a", "b")
    a, b = fleet.routers.values()
    for number in range(1000):
        replica = ReplicaId(f"r{number}")
        b.engines = {replica: engine_view(number=1)}
        a.engines = {replica: engine_view(number=1), R: engine_view(number=number + 1)}
        a.metrics.answer("b", ())
        if number % 100 == 0:
            await a.scrape()
    a.engines = {R: engine_view()}
    engines = {dict(labels).get("engine") for _, labels in await a.scrape()} - {None}
    assert engines == {R}
    assert set(a.metrics._engine_reports) == {R}


async def test_nobody_joins_a_round_that_has_begun() -> None:
    """Its answers may be older than what a client has just seen elsewhere. Those who wait share one."""
    fleet = SomeRouters("a", "b")
    a, b = fleet.routers.values()
    fleet.hold = asyncio.Event()
    early = asyncio.create_task(a.scrape())
    await fleet.asked.wait()
    b.work()
    late = [asyncio.create_task(a.scrape()) for _ in range(5)]
    await asyncio.sleep(0)
    fleet.hold.set()
    assert requests(await early, "b") is None  # answered before
    assert [requests(values, "b") for values in await asyncio.gather(*late)] == [1] * 5
    assert fleet.num_asked == 2


async def test_answers_that_cannot_be_read_are_those_of_a_router_that_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = SomeRouters("a", "b")
    a, b = fleet.routers.values()
    b.work()
    await a.scrape()
    b.metrics.answer = lambda asker, wanted: b"\xc1"  # type: ignore[method-assign]
    values = await a.scrape()
    assert (requests(values, "b"), up(values)["b"]) == (1, 0)
    assert "cannot be read" in caplog.text


async def test_a_scrape_that_is_given_up_ends_nobody_elses() -> None:
    fleet = SomeRouters("a", "b")
    a = fleet.routers["a"]
    fleet.hold = asyncio.Event()
    first, second = asyncio.create_task(a.scrape()), asyncio.create_task(a.scrape())
    await asyncio.sleep(0.01)
    first.cancel()
    fleet.hold.set()
    assert up(await second) == {"a": 1, "b": 1}
    await a.metrics.aclose()
    await a.metrics.aclose()
