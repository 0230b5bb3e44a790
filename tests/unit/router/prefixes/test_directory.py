"""A pin that no replica tells of is found and counted through whichever Router is asked."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cache.types import PinId, ReplicaId
from router.errors import PrefixNotFound, RouterUnheard
from router.prefixes import directory
from tests.fakes.prefixes import PaperRouter, settle
from tests.unit.router.prefixes.several import being_remade, find, gate, ids, settle_all


async def test_whoever_is_asked_knows_what_is_being_made_again(routers: list[PaperRouter]) -> None:
    pin_id, opened = await being_remade(routers)
    for router in routers:
        found = await find(router, pin_id)
        assert (found.keeper, found.copies, list(found.replicas), found.is_whole) == ("router0", 1, [], False)
        assert await ids(router) == [pin_id]
        assert await ids(router, "bob") == []
        with pytest.raises(PrefixNotFound):
            await router.directory.find(pin_id, "bob")
    opened.set()
    await settle_all(routers)
    for router in routers:
        assert (await find(router, pin_id)).is_whole


async def test_at_a_glance_everybodys_are_seen_once_others_have_been_heard(
    routers: list[PaperRouter],
) -> None:
    """The live page showed what the asked Router kept alone, and never waits for another one."""
    pin_id, opened = await being_remade(routers)
    glance = routers[1].directory.at_a_glance
    assert glance() == []
    await _looked(routers[1])
    (seen,) = glance()
    assert (seen.pin_id, seen.owner, list(seen.replicas)) == (pin_id, "alice", [])
    opened.set()
    await settle_all(routers)
    (seen,) = glance()
    assert seen.is_whole


async def test_what_was_heard_long_ago_is_not_seen(
    routers: list[PaperRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    await being_remade(routers)
    routers[1].directory.at_a_glance()
    await _looked(routers[1])
    monkeypatch.setattr(directory, "GLANCE_S", -1.0)
    assert routers[1].directory.at_a_glance() == []


async def test_however_many_look_others_are_asked_once(routers: list[PaperRouter]) -> None:
    for _ in range(50):
        routers[1].directory.at_a_glance()
    await settle(routers[1])
    assert routers[1].fleet.num_rounds == 1


async def _looked(router: PaperRouter) -> None:
    """The others have been asked, and have answered."""
    await router.directory.pins("nobody")


async def test_and_that_it_is_whole_before_its_replica_has_told(routers: list[PaperRouter]) -> None:
    fleet = routers[0].fleet
    pin_id = await routers[0].hold(copies=2, seconds=600.0)
    assert all(not report.pins for report in fleet.reports.values())
    for router in routers:
        assert (await find(router, pin_id)).is_whole
        assert [pin.is_whole for pin in await router.directory.pins("alice")] == [True]


async def test_what_is_computed_for_the_first_time_counts_everywhere(routers: list[PaperRouter]) -> None:
    opened = gate(routers[0].fleet)
    making = asyncio.create_task(routers[0].hold(copies=2))
    await asyncio.sleep(0)
    for router in routers:
        (pin,) = await router.directory.pins("alice")
        assert (pin.num_blocks, pin.copies) == (4, 2)
    opened.set()
    assert await ids(routers[1]) == [await making]


async def test_who_does_not_answer_may_keep_it(routers: list[PaperRouter]) -> None:
    """Not found is said only by all."""
    pin_id, _ = await being_remade(routers)
    with pytest.raises(PrefixNotFound):
        await find(routers[1], "prefix-of-nobody")
    routers[0].fleet.silent.add("router0")
    for name in (pin_id, "prefix-of-nobody"):
        with pytest.raises(RouterUnheard):
            await find(routers[1], name)
    assert await ids(routers[1]) == []


async def test_nor_is_it_said_by_one_that_cannot_be_read(
    routers: list[PaperRouter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pin_id, _ = await being_remade(routers)
    monkeypatch.setattr(routers[0].directory, "answer", lambda _asker: b"of another version")
    with caplog.at_level(logging.WARNING), pytest.raises(RouterUnheard):
        await find(routers[1], pin_id)
    assert [record.getMessage() for record in caplog.records] == ["a router's prefixes cannot be read"]


async def test_what_a_replica_tells_of_needs_no_other_router(routers: list[PaperRouter]) -> None:
    fleet = routers[0].fleet
    pin_id = await routers[0].hold(copies=1)
    await settle(routers[0])
    fleet.silent.add("router0")
    assert (await find(routers[1], pin_id)).replicas == tuple(fleet.holders(pin_id))
    assert fleet.num_rounds == 0


async def test_many_who_ask_at_once_share_an_answer(routers: list[PaperRouter]) -> None:
    pin_id, _ = await being_remade(routers)
    found = await asyncio.gather(*(find(routers[1], pin_id) for _ in range(100)))
    assert {pin.pin_id for pin in found} == {pin_id}
    assert routers[0].fleet.num_rounds == 1


async def test_copies_known_to_either_side_are_told(routers: list[PaperRouter]) -> None:
    """One is in the reports, the other only in its keeper's memory."""
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(copies=2, seconds=600.0))
    first, second = fleet.holders(pin_id)
    fleet.reports[first] = fleet.replicas[first].report()
    (told,) = await routers[1].directory.pins("alice")
    assert set(told.replicas) == {first, second}
    await routers[1].directory.give_back(told)
    assert fleet.holders(pin_id) == list[ReplicaId]()
