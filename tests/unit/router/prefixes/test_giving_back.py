"""A pin that is given back through whichever Router does not come back, whoever leaves, hangs or dies."""

from __future__ import annotations

import asyncio

import pytest

from cache.messages import GenerateRequest
from cache.types import PinId
from router.errors import PrefixNotFound, ReplicaLost
from router.prefixes import directory, keeper
from router.prefixes.copy_maker import TIMEOUT_S
from router.prefixes.succession import GONE_AFTER_S
from router.prefixes.tombstones import FORGET_S, GivenBack
from tests.fakes.prefixes import PaperFleet, PaperRouter, hold_late, settle
from tests.unit.router.prefixes.several import being_remade, find, gate, ids, settle_all


@pytest.mark.parametrize("asked", [0, 1, 2])
async def test_it_is_given_back_through_whichever_router(routers: list[PaperRouter], asked: int) -> None:
    """The call that makes it again may be answered all the same: it ends then."""
    fleet = routers[0].fleet
    pin_id, opened = await being_remade(routers)
    await routers[asked].directory.give_back(await find(routers[asked], pin_id))
    for router in routers:
        assert await ids(router) == []
        with pytest.raises(PrefixNotFound):
            await find(router, pin_id)
    opened.set()
    await settle_all(routers)
    assert fleet.holders(pin_id) == []
    fleet.clock.advance(FORGET_S + 1)
    await settle_all(routers)
    assert fleet.holders(pin_id) == []
    assert all(not router.keeper.keeps(pin_id) for router in routers)


async def test_its_keeper_hears_of_it_before_it_looks(routers: list[PaperRouter]) -> None:
    """A holder that died within that half second was taken for a lost copy."""
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(copies=1, seconds=600.0))
    await settle(routers[0])
    (holder,) = fleet.holders(pin_id)
    await routers[1].directory.give_back(await find(routers[1], pin_id))
    fleet.lose(holder)
    await settle_all(routers)
    assert fleet.holders(pin_id) == []
    assert await ids(routers[0]) == []


async def test_a_keeper_that_cannot_be_told_is_overruled(routers: list[PaperRouter]) -> None:
    """It makes the copy again; whoever was asked ends that, however late, and so the keeper learns of it."""
    fleet = routers[0].fleet
    pin_id, opened = await being_remade(routers)
    found = await find(routers[1], pin_id)
    fleet.silent.add("router0")
    await routers[1].directory.give_back(found)
    fleet.silent.clear()
    fleet.clock.advance(60.0)
    assert routers[0].keeper.keeps(pin_id)
    opened.set()
    await settle(routers[0])
    assert fleet.holders(pin_id) != []
    await settle_all(routers)
    assert fleet.holders(pin_id) == []
    assert not routers[0].keeper.keeps(pin_id)
    assert await ids(routers[2]) == []


@pytest.mark.parametrize("asked", [0, 1, 2])
async def test_a_replica_that_could_not_be_asked_brings_it_not_back(
    routers: list[PaperRouter], asked: int
) -> None:
    """Five seconds later it was taken for a dead Router's, adopted, and held for the rest of its time."""
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(copies=2, seconds=600.0))
    await settle_all(routers)
    lost = fleet.holders(pin_id)[0]
    fleet.deaf.add(lost)
    fleet.mute.add(lost)
    await routers[asked].directory.give_back(await find(routers[asked], pin_id))
    fleet.clock.advance(60.0)
    await settle_all(routers)
    assert fleet.holders(pin_id) == [lost]
    for router in routers:
        assert await ids(router) == []
    fleet.deaf.clear()
    fleet.mute.clear()
    for router in routers:
        await router.succession.look()
        assert not router.keeper.keeps(pin_id)
    await settle_all(routers)
    assert fleet.holders(pin_id) == []


async def test_routers_that_leave_tell_those_that_come(routers: list[PaperRouter]) -> None:
    """In a rolling update all that heard of it are replaced."""
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(copies=1, seconds=600.0))
    await settle_all(routers)
    fleet.deaf.update(fleet.holders(pin_id))
    await routers[0].directory.give_back(await find(routers[0], pin_id))
    routers.append(PaperRouter(fleet))
    for _ in range(3):
        leaving = routers.pop(0)
        await leaving.directory.hand_on()
        fleet.routers.remove(leaving)
        await leaving.keeper.aclose()
    fleet.clock.advance(60.0)
    await settle(routers[0])
    fleet.deaf.clear()
    await routers[0].succession.look()
    fleet.clock.advance(60.0)
    await settle(routers[0])
    assert fleet.holders(pin_id) == []
    assert not routers[0].keeper.keeps(pin_id)


@pytest.mark.parametrize("stays", ["its keeper", "one that was told", "one that has come"])
async def test_who_remembers_it_looks_after_it_until_its_leases_have_ended(
    routers: list[PaperRouter], monkeypatch: pytest.MonkeyPatch, stays: str
) -> None:
    """Also a Router that keeps nothing. A lease begins when its copy has been computed."""
    monkeypatch.setattr(keeper, "LOOK_INTERVAL_S", 0.0)
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(copies=1, seconds=600.0))
    fleet.tell()
    fleet.deaf.update(fleet.holders(pin_id))
    fleet.mute.update(fleet.holders(pin_id))
    await routers[0].directory.give_back(await find(routers[0], pin_id))
    if stays == "one that has come":
        routers.append(PaperRouter(fleet))
        await routers[0].directory.hand_on()
    await end_all_but(routers.pop(0 if stays == "its keeper" else -1), routers)
    fleet.clock.advance(600.0 + TIMEOUT_S - 1.0)
    fleet.tell()
    await turns()
    fleet.deaf.clear()
    fleet.mute.clear()
    fleet.tell()
    await turns()
    assert fleet.holders(pin_id) == []


async def turns() -> None:
    """Enough of the event loop for whoever looks at each of them."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_router_that_leaves_hears_nothing_of_itself(routers: list[PaperRouter]) -> None:
    """It is among those that it tells: it would await all replicas anew."""
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(copies=1, seconds=600.0))
    await settle_all(routers)
    fleet.deaf.update(holders := fleet.holders(pin_id))
    await routers[0].directory.give_back(await find(routers[0], pin_id))
    await settle(routers[0])
    await routers[0].directory.hand_on()
    assert list(routers[0].keeper.given_back().replicas) == holders


async def test_one_that_knows_of_no_other_says_that_it_is_forgotten(
    routers: list[PaperRouter], caplog: pytest.LogCaptureFixture
) -> None:
    routers[0].directory.others = directory.NoOtherRouters()
    await routers[0].directory.give_back(await find(routers[0], await routers[0].hold()))
    await routers[0].directory.hand_on()
    assert [record.num_given_back for record in caplog.records] == [1]  # type: ignore[attr-defined]


async def pass_minutes(routers: list[PaperRouter]) -> None:
    """Each replica reports, and each Router looks, again and again."""
    for _ in range(3):
        routers[0].fleet.clock.advance(60.0)
        await settle_all(routers)


async def leave(routers: list[PaperRouter]) -> None:
    """The first one does, in order."""
    await routers[0].directory.hand_on()
    await die(routers)


async def die(routers: list[PaperRouter]) -> None:
    """The first one does."""
    dying = routers.pop(0)
    dying.fleet.routers.remove(dying)
    await dying.directory.aclose()
    await dying.keeper.aclose()


async def end_all_but(stays: PaperRouter, routers: list[PaperRouter]) -> None:
    """routers: without that one, which is alone afterwards."""
    while routers:
        await die(routers)
    routers.append(stays)


async def test_they_tell_of_what_was_given_up_while_it_was_made(routers: list[PaperRouter]) -> None:
    """Each replica has reported without it by then, and one computes it all the same."""
    fleet = routers[0].fleet
    gate(fleet)
    making = asyncio.create_task(routers[0].hold(copies=1, seconds=600.0))
    while not fleet.requests:  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    fleet.clock.advance(1.0)
    await settle(routers[0])
    routers.append(PaperRouter(fleet))
    await leave(routers)
    await pass_minutes(routers)
    hold_late(fleet, fleet.requests[-1])
    await _looked_for_orphans(routers)
    assert await ids(routers[-1]) == []
    assert not any(replica.pins for replica in fleet.replicas.values())


async def test_and_of_what_its_keeper_has_not_heard_of(routers: list[PaperRouter]) -> None:
    fleet = routers[0].fleet
    pin_id, opened = await being_remade(routers)
    keeper = routers.pop(0)
    found = await find(routers[0], pin_id)
    fleet.silent.add(keeper.name)
    await routers[0].directory.give_back(found)
    await settle_all(routers)
    await leave(routers)
    fleet.silent.clear()
    fleet.clock.advance(TIMEOUT_S)  # for longer than a copy may take that is being made
    await pass_minutes(routers)
    opened.set()
    for _ in range(3):
        await settle_all([keeper, *routers])
    routers.append(keeper)
    assert fleet.holders(pin_id) == []
    assert not keeper.keeper.keeps(pin_id)


async def test_its_keeper_may_hear_of_it_then(routers: list[PaperRouter]) -> None:
    pin_id, opened = await being_remade(routers)
    keeper, fleet = routers[0], routers[0].fleet
    found = await find(routers[1], pin_id)
    fleet.silent.add(keeper.name)
    await routers[1].directory.give_back(found)
    fleet.silent.clear()
    assert keeper.keeper.keeps(pin_id)
    routers.append(routers.pop(0))  # its turn to leave is another time
    await leave(routers)
    assert not keeper.keeper.keeps(pin_id)
    opened.set()
    await settle_all(routers)
    assert fleet.holders(pin_id) == []


@pytest.mark.parametrize(("asked", "stays"), [(0, 0), (0, 2), (1, 2), (2, 2)])
async def test_a_copy_that_comes_late_is_ended_whoever_has_died(
    routers: list[PaperRouter], asked: int, stays: int
) -> None:
    """Others than its keeper forgot it after seconds, and adopted the copy that the replica went on with."""
    fleet = routers[0].fleet
    pin_id, _ = await being_remade(routers)
    await routers[asked].directory.give_back(await find(routers[asked], pin_id))
    await end_all_but(routers.pop(stays), routers)
    await pass_minutes(routers)
    hold_late(fleet, fleet.requests[-1])
    for _ in range(2):
        await _looked_for_orphans(routers)
        assert await ids(routers[0]) == []
        fleet.clock.advance(GONE_AFTER_S)
    assert fleet.holders(pin_id) == []


async def test_so_is_one_whose_call_was_lost_before(routers: list[PaperRouter]) -> None:
    """Its keeper was not making one at the moment, and remembered as little as of one that is whole."""
    router, fleet = routers[0], routers[0].fleet
    pin_id, opened = await being_remade(routers)
    for replica in fleet.replicas.values():
        replica.script = lose
    opened.set()
    await settle(router)
    lost = fleet.requests[-1]
    await router.directory.give_back(await find(router, pin_id))
    await pass_minutes(routers)
    hold_late(fleet, lost)
    assert await ids(router) == []
    await settle(router)
    assert fleet.holders(pin_id) == []


def lose(_request: GenerateRequest) -> None:
    raise ReplicaLost("its connection was cut")


async def test_one_that_hangs_keeps_the_others_from_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were told one after the other: of three prefixes a newcomer heard of one."""
    monkeypatch.setattr(directory, "ANSWER_TIMEOUT_S", 0.01)
    fleet = HungFleet(4)
    routers = [PaperRouter(fleet) for _ in range(2)]
    pin_ids = [await routers[0].hold(2, copies=1, seconds=600.0) for _ in range(3)]
    await settle_all(routers)
    fleet.deaf.update(fleet.replicas)
    fleet.mute.update(fleet.replicas)
    for pin_id in pin_ids:
        await routers[0].directory.give_back(await find(routers[0], pin_id))
    fleet.silent.add("router1")
    routers.append(PaperRouter(fleet))
    caplog.clear()
    await leave(routers)
    assert list(routers[-1].keeper.given_back().seconds) == pin_ids
    assert [record.num_given_back for record in caplog.records] == [3]  # type: ignore[attr-defined]
    for router in routers:
        await router.keeper.aclose()


class HungFleet(PaperFleet):
    """Whose silent Routers are waited for, as long as whoever asks will."""

    async def prefix_given_back(self, asker: str, pin_id: PinId, timeout_s: float) -> list[bool]:
        heard = await super().prefix_given_back(asker, pin_id, timeout_s)
        await self._wait(timeout_s)
        return heard

    async def prefixes_handed_on(self, asker: str, given_back: GivenBack, timeout_s: float) -> bool:
        is_heard = await super().prefixes_handed_on(asker, given_back, timeout_s)
        await self._wait(timeout_s)
        return is_heard

    async def _wait(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s if self.silent else 0.0)


async def test_who_has_nothing_to_tell_waits_for_nobody(
    routers: list[PaperRouter], caplog: pytest.LogCaptureFixture
) -> None:
    """What every replica has confirmed comes back nowhere."""
    pin_id = await routers[0].hold(copies=1, seconds=600.0)
    await settle_all(routers)
    await routers[0].directory.give_back(await find(routers[0], pin_id))
    await settle_all(routers)
    assert routers[0].keeper.is_given_back(PinId(pin_id))
    routers[0].fleet.silent.add("router1")
    await routers[0].directory.hand_on()
    assert caplog.records == []


async def _looked_for_orphans(routers: list[PaperRouter]) -> None:
    for _ in range(2):
        await settle_all(routers)
        for router in routers:
            await router.succession.look()
