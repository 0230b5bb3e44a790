"""Pins a Router keeps: made again where lost, given back; told from what replicas say."""

from __future__ import annotations

import asyncio

import pytest

from cache.types import ReplicaId
from router.errors import AllBusy, PrefixNotFound
from router.prefixes.keeper import MAX_UNTOLD_REPORTS
from tests.fakes.prefixes import PaperFleet, PaperRouter, names, settle
from tests.fakes.router import load


class TestKeeping:
    async def test_a_copy_that_died_is_made_again_elsewhere(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=2)
        await settle(router)
        fleet.lose(fleet.holders(pin)[0])
        assert not router.keeper.pins("alice")[0].is_whole
        await settle(router)
        assert len(fleet.holders(pin)) == 2
        assert router.keeper.pins("alice")[0].is_whole
        assert router.keeper.statistics().num_copies_restored == 1

    async def test_the_only_copy_that_died_is_made_again(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=1)
        await settle(router)
        fleet.lose(fleet.holders(pin)[0])
        assert [told.pin_id for told in router.keeper.pins()] == [pin]  # nobody holds it: still told
        await settle(router)
        assert len(fleet.holders(pin)) == 1

    async def test_a_lost_copy_is_made_again_where_newcomers_are_refused(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=1)
        for name in fleet.replicas:
            router.routing.on_load(name, load(queued_uncached_tokens=1_000_000, num_waiting=3))
        fleet.lose(fleet.holders(pin)[0])
        await settle(router)
        assert len(fleet.holders(pin)) == 1
        with pytest.raises(AllBusy):
            await router.hold(copies=1)

    async def test_a_copy_that_drains_is_made_elsewhere(self, fleet: PaperFleet, router: PaperRouter) -> None:
        pin = await router.hold(copies=1)
        await settle(router)
        (leaving,) = fleet.holders(pin)
        router.routing.on_load(leaving, load(is_draining=True))
        await settle(router)
        assert len(set(fleet.holders(pin)) - {leaving}) == 1

    async def test_another_life_of_an_engine_holds_nothing(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=1)
        await settle(router)
        (holder,) = fleet.holders(pin)
        fleet.replicas[holder].pins.clear()
        fleet.replicas[holder].epoch = 2
        await settle(router)
        assert len(fleet.holders(pin)) == 1

    async def test_where_there_is_no_other_it_waits_for_one(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=3)
        await settle(router)
        fleet.lose(ReplicaId("r0"))
        await settle(router)
        asked = len(fleet.asked)
        await settle(router)  # not at once again
        assert len(fleet.asked) == asked
        assert not router.keeper.pins()[0].is_whole
        fleet.replicas.update(PaperFleet(1).replicas)  # a new one, of the old name
        router.routing.update_replicas({name: each.info for name, each in fleet.replicas.items()})
        router.routing.on_load(ReplicaId("r0"), load())
        fleet.clock.advance(2.0)
        for name in names(1, 2):
            router.routing.on_load(name, load())
        await settle(router)
        assert len(fleet.holders(pin)) == 3

    async def test_of_two_that_were_lost_one_is_better_than_none(self) -> None:
        fleet = PaperFleet(4)
        router = PaperRouter(fleet)
        pin = await router.hold(copies=3)
        await settle(router)
        for name in fleet.holders(pin)[:2]:
            fleet.lose(name)
        await settle(router)
        assert len(fleet.holders(pin)) == 2
        await router.keeper.aclose()

    async def test_the_time_that_is_left_goes_along(self, fleet: PaperFleet, router: PaperRouter) -> None:
        pin = await router.hold(copies=1, seconds=60.0)
        await settle(router)
        fleet.clock.advance(4.0)
        fleet.lose(fleet.holders(pin)[0])
        await settle(router)
        (holder,) = fleet.holders(pin)
        lease, _ = fleet.replicas[holder].pins[pin]  # type: ignore[index]
        assert lease.seconds == pytest.approx(56.0)

    @pytest.mark.parametrize("turns", range(8))
    async def test_a_router_that_ends_gives_nothing_back(
        self, fleet: PaperFleet, router: PaperRouter, turns: int
    ) -> None:
        """Nor where it was making a lost copy again: another Router adopts what is left."""
        pin = await router.hold(copies=2)
        fleet.tell()
        dying, left = fleet.holders(pin)
        for name in fleet.replicas.keys() - {dying, left}:
            fleet.replicas[name].gate = asyncio.Event()
        fleet.lose(dying)
        router.keeper.look()
        for _ in range(turns):
            await asyncio.sleep(0)
        await router.keeper.aclose()
        for _ in range(10):
            await asyncio.sleep(0)
        assert fleet.holders(pin) == [left]

    async def test_when_its_time_is_over_it_is_forgotten(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=2, seconds=60.0)
        await settle(router)
        fleet.clock.advance(60.0)
        await settle(router)
        assert fleet.holders(pin) == []
        assert router.keeper.pins() == []
        assert router.keeper.statistics().num_kept == 0


class TestGivingBack:
    async def test_every_replica_is_told(self, fleet: PaperFleet, router: PaperRouter) -> None:
        pin = await router.hold(copies=2)
        fleet.tell()
        found = router.keeper.find(pin, "alice")
        assert found is not None
        await router.keeper.give_back(found)
        assert fleet.holders(pin) == []
        assert router.keeper.pins() == []  # though the last reports still tell of it

    async def test_what_is_still_being_computed(self, fleet: PaperFleet, router: PaperRouter) -> None:
        """It is listed from the moment it is asked for, so it may be given back from then on."""
        gate = asyncio.Event()
        for replica in fleet.replicas.values():
            replica.gate = gate
        making = asyncio.create_task(router.hold(copies=2))
        while not fleet.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        (found,) = router.keeper.pins("alice")
        assert not found.is_whole
        await router.keeper.give_back(found)
        gate.set()
        with pytest.raises(PrefixNotFound):
            await making
        await settle(router)
        assert fleet.holders(found.pin_id) == []
        assert router.keeper.pins() == []

    @pytest.mark.parametrize("turns", range(1, 8))
    async def test_who_hangs_up_meanwhile_has_given_it_back(
        self, fleet: PaperFleet, router: PaperRouter, turns: int
    ) -> None:
        """A half of it that was left would be taken for a dead Router's, and made whole again."""
        pin = await router.hold(copies=2)
        fleet.tell()
        (found,) = router.keeper.pins("alice")
        giving = asyncio.create_task(router.keeper.give_back(found))
        for _ in range(turns):
            await asyncio.sleep(0)
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)
        assert fleet.holders(pin) == []

    async def test_with_its_owner_gone_nobody_else_could(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        """It was held to the end of its time, a day at most."""
        gone = await router.hold(copies=2, owner="alice")
        stays = await router.hold(copies=1, owner="bob")
        await settle(router)
        del fleet.turns["alice"]
        await settle(router)
        assert fleet.holders(gone) == []
        assert len(fleet.holders(stays)) == 1
        assert [told.pin_id for told in router.keeper.pins()] == [stays]

    async def test_nor_is_it_made_again(self, fleet: PaperFleet, router: PaperRouter) -> None:
        pin = await router.hold(copies=1)
        await settle(router)
        fleet.lose(fleet.holders(pin)[0])
        del fleet.turns["alice"]
        await settle(router)
        assert fleet.holders(pin) == []
        assert len(fleet.requests) == 1

    async def test_nor_is_it_held_where_it_was_taken_for_lost(self) -> None:
        """A list of replicas may lack one for a moment."""
        fleet = PaperFleet(1)
        router = PaperRouter(fleet)
        await router.hold(copies=1)
        name, replica = next(iter(fleet.replicas.items()))
        fleet.lose(name)
        await settle(router)
        del fleet.turns["alice"]
        await settle(router)
        fleet.replicas[name] = replica
        router.routing.update_replicas({name: replica.info})
        fleet.tell()
        assert router.keeper.pins() == []
        await settle(router)
        assert replica.pins == {}
        await router.keeper.aclose()

    async def test_whose_owner_goes_while_it_is_computed(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        for replica in fleet.replicas.values():
            replica.gate = asyncio.Event()
        asking = asyncio.create_task(router.hold(copies=1))
        await settle(router)
        del fleet.turns["alice"]
        for replica in fleet.replicas.values():
            assert replica.gate is not None
            replica.gate.set()
        pin = await asking
        await settle(router)
        assert fleet.holders(pin) == []
        with pytest.raises(PrefixNotFound):
            await router.hold(copies=1)

    async def test_nobody_finds_what_is_another_keys(self, router: PaperRouter) -> None:
        pin = await router.hold(copies=1)
        router.fleet.tell()
        assert router.keeper.find(pin, "bob") is None
        assert router.keeper.pins("bob") == []

    async def test_a_replica_that_cannot_be_asked_is_left_to_its_lease(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=2)
        fleet.tell()
        found = router.keeper.find(pin, "alice")
        assert found is not None
        del fleet.replicas[fleet.holders(pin)[0]]  # Serve has not said so yet
        await router.keeper.give_back(found)
        assert fleet.holders(pin) == []


class TestSeveralRouters:
    async def test_each_tells_of_all(self, fleet: PaperFleet, router: PaperRouter) -> None:
        other = PaperRouter(fleet)
        pins = {await router.hold(copies=2), await other.hold(copies=1)}
        fleet.tell()
        for one in (router, other):
            assert {told.pin_id for told in one.keeper.pins("alice")} == pins
            assert all(told.is_whole for told in one.keeper.pins("alice"))
        await other.keeper.aclose()

    async def test_what_one_gives_back_the_other_does_not_make_again(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        other = PaperRouter(fleet)
        pin = await router.hold(copies=2)
        await settle(router)
        found = other.keeper.find(pin, "alice")
        assert found is not None
        await other.keeper.give_back(found)
        for _ in range(3):
            await settle(router)
            fleet.clock.advance(1.0)
        assert fleet.holders(pin) == []
        assert router.keeper.pins() == other.keeper.pins() == []
        await other.keeper.aclose()

    async def test_nor_what_was_given_back_before_it_was_told(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=1)
        for replica in fleet.replicas.values():
            replica.pins.clear()
        for _ in range(MAX_UNTOLD_REPORTS + 2):
            await settle(router)
        assert fleet.holders(pin) == []
        assert router.keeper.statistics().num_kept == 0

    async def test_a_pin_outlives_its_router(self, fleet: PaperFleet, router: PaperRouter) -> None:
        gone = PaperRouter(fleet)
        pin = await gone.hold(copies=2)
        fleet.tell()
        await gone.keeper.aclose()
        fleet.routers.remove(gone)
        assert router.keeper.find(pin, "alice") is not None
        assert len(fleet.holders(pin)) == 2


async def test_a_load_without_reports_is_waited_for(fleet: PaperFleet, router: PaperRouter) -> None:
    """A Router that has just started knows its replicas half a second before their first reports."""
    reports, fleet.reports = fleet.reports, {}
    making = asyncio.create_task(router.hold(copies=1))
    await asyncio.sleep(0.05)
    assert not making.done()
    fleet.reports = reports
    assert len(fleet.holders(await making)) == 1
