"""Pins a Router is asked for: who is to hold them, and what becomes of those that cannot be made."""

from __future__ import annotations

import asyncio

import pytest

from cache.block_hash import hints
from cache.errors import PiecesLost, PinsFull, ServingError
from cache.events import EventBatch, digest_of
from cache.messages import GenerateRequest
from cache.scheduling_order import SchedulingOrder
from cache.types import ReplicaId
from router.errors import AllBusy, NoReplica, PrefixCachingOff, PrefixDoesNotFit, ReplicaLost
from tests.fakes.prefixes import MAX_PINNED, PaperFleet, PaperRouter, a_prefix, hold_late, names, settle
from tests.fakes.router import load, told


class TestMaking:
    async def test_copies_are_held_by_different_replicas(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        pin = await router.hold(copies=3)
        assert sorted(fleet.holders(pin)) == names(0, 1, 2)
        (told,) = router.keeper.pins("alice")
        assert (told.pin_id, told.num_blocks, told.copies, told.is_whole) == (pin, 4, 3, True)

    async def test_who_holds_most_of_it_comes_first(self, fleet: PaperFleet, router: PaperRouter) -> None:
        known = hints(a_prefix(4).block_hashes)
        batch = EventBatch(2, 1, 1, tuple(known), (), digest_of(known), load())
        router.routing.on_events(ReplicaId("r2"), batch)
        pin = await router.hold(copies=1)
        assert fleet.holders(pin) == names(2)

    async def test_who_is_busy_comes_last(self, fleet: PaperFleet, router: PaperRouter) -> None:
        for name in names(0, 2):
            router.routing.on_load(name, load(queued_uncached_tokens=50_000, num_waiting=3))
        assert fleet.holders(await router.hold(copies=1)) == names(1)

    @pytest.mark.parametrize(("owner", "idlest"), [("alice", 1), ("bob", 0)])
    async def test_anothers_prompts_that_stand_back_for_its_owner_keep_nobody_busy(
        self, owner: str, idlest: int
    ) -> None:
        """Two replicas have the same queue, each of another tenant's prompts, shorter than this one."""
        fleet = PaperFleet(2, scheduling_order=SchedulingOrder.SHORTEST_PREEMPTING)
        router = PaperRouter(fleet)
        for name, tenant in zip(names(0, 1), ("alice's", "bob's"), strict=True):
            waiting = told(*[3] * 40, tenant=tenant)
            queued = {"queued_uncached_tokens": sum(waiting.tokens), "num_waiting": 40, "queued": (waiting,)}
            router.routing.on_load(name, load(**queued))
        assert fleet.holders(await router.hold(copies=1, owner=owner)) == names(idlest)
        await router.keeper.aclose()

    @pytest.mark.parametrize("num_replicas", [1, 3])
    async def test_it_is_refused_where_requests_are(self, num_replicas: int) -> None:
        """With several replicas it was let in however long it would wait."""
        fleet = PaperFleet(num_replicas)
        router = PaperRouter(fleet)
        for name in fleet.replicas:
            router.routing.on_load(name, load(queued_uncached_tokens=1_000_000, num_waiting=3))
        with pytest.raises(AllBusy):
            await router.hold(copies=1)
        await settle(router)
        assert fleet.asked == []
        assert router.keeper.pins() == []
        await router.keeper.aclose()

    async def test_who_leaves_or_is_silent_is_not_asked(self, fleet: PaperFleet, router: PaperRouter) -> None:
        router.routing.on_load(ReplicaId("r0"), load(is_draining=True))
        assert sorted(fleet.holders(await router.hold(copies=2))) == names(1, 2)
        with pytest.raises(NoReplica):
            await router.hold(copies=3)
        fleet.clock.advance(100.0)  # nobody was heard for so long
        with pytest.raises(NoReplica):
            await router.hold(copies=1)

    async def test_where_those_with_room_cannot_be_asked_it_is_not_too_much(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        """To delete some, or ask for less, would not help: to ask again will."""
        for name in names(0, 1, 2):
            router.routing.on_load(name, load(is_draining=True))
        with pytest.raises(NoReplica) as caught:
            await router.hold(copies=1)
        assert (caught.value.num_known, caught.value.num_excluded) == (3, 3)
        with pytest.raises(PrefixDoesNotFit):
            await router.hold(MAX_PINNED + 1, copies=1)
        assert router.keeper.statistics().num_refused == 1

    async def test_another_is_asked_where_one_refuses_or_dies(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        """Its room was less than its report said, say."""

        def die(_request: GenerateRequest) -> None:
            raise ReplicaLost("killed")

        fleet.replicas[ReplicaId("r0")].taken = 8
        fleet.replicas[ReplicaId("r1")].script = die
        assert fleet.holders(await router.hold(copies=1)) == names(2)
        assert router.keeper.statistics().num_copies_made == 1

    async def test_a_copy_whose_answer_was_lost_is_given_back_too(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        def hold_and_die(request: GenerateRequest) -> None:
            assert request.pin is not None
            fleet.replicas[ReplicaId("r0")].pins[request.pin.pin_id] = request.pin, 4
            fleet.tell()
            raise ReplicaLost("its connection was cut")

        fleet.replicas[ReplicaId("r0")].script = hold_and_die
        with pytest.raises(NoReplica):
            await router.hold(copies=3)
        await settle(router)
        assert not any(replica.pins for replica in fleet.replicas.values())

    async def test_a_copy_that_comes_after_its_pin_has_failed_is_given_back(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        """The call was lost while the engine went on. Left there, this Router would have adopted it."""
        asked: list[GenerateRequest] = []

        def lose(request: GenerateRequest) -> None:
            asked.append(request)
            raise ReplicaLost("its connection was cut")

        fleet.replicas[ReplicaId("r0")].script = lose
        with pytest.raises(NoReplica):
            await router.hold(copies=3)
        await settle(router)
        fleet.clock.advance(20.0)
        hold_late(fleet, asked[0])
        await settle(router)
        assert not any(replica.pins for replica in fleet.replicas.values())
        assert router.keeper.pins() == []

    async def test_a_copy_that_outruns_its_clients_leaving_is_given_back(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        """The replica heard that it is given back before it heard that its call was cancelled."""
        asked: list[GenerateRequest] = []
        fleet.replicas[ReplicaId("r0")].script = asked.append
        fleet.replicas[ReplicaId("r1")].gate = asyncio.Event()
        making = asyncio.create_task(router.hold(copies=3))
        for _ in range(20):
            await asyncio.sleep(0)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await settle(router)
        hold_late(fleet, asked[0])
        await settle(router)
        assert not any(replica.pins for replica in fleet.replicas.values())

    async def test_what_does_not_fit_says_both_numbers_and_leaves_nothing(
        self, fleet: PaperFleet, router: PaperRouter
    ) -> None:
        await router.hold(7, copies=2)
        fleet.tell()
        with pytest.raises(PrefixDoesNotFit) as caught:
            await router.hold(5, copies=2)
        assert (caught.value.needed, caught.value.copies, caught.value.num_held) == (5, 2, 1)
        assert caught.value.left == MAX_PINNED - 7
        assert "needs 5 blocks" in str(caught.value)
        assert "3 blocks left" in str(caught.value)
        await settle(router)
        assert len(router.keeper.pins()) == 1
        assert sum(len(replica.pins) for replica in fleet.replicas.values()) == 2
        assert router.keeper.statistics().num_refused == 1

    @pytest.mark.parametrize(("num_blocks", "asked"), [(5, names(0, 1, 2)), (MAX_PINNED + 1, [])])
    async def test_what_nobody_holds_need_not_be_remembered(
        self, fleet: PaperFleet, router: PaperRouter, num_blocks: int, asked: list[ReplicaId]
    ) -> None:
        """Clients that tried again drove out what was given back while a replica could not be asked."""
        await router.hold(7, copies=3)
        fleet.tell()
        fleet.asked.clear()
        with pytest.raises(PrefixDoesNotFit):
            await router.hold(num_blocks, copies=1)
        assert sorted(fleet.asked) == asked
        assert router.keeper.given_back().seconds == {}

    @pytest.mark.parametrize("errors", [(ReplicaLost("cut"),), (PiecesLost(), PinsFull(4, 0))])
    async def test_what_a_replica_may_come_to_hold_is(self, errors: tuple[ServingError, ...]) -> None:
        """Also where it refuses a second attempt, while the first may go on."""
        fleet, left = PaperFleet(1), list(errors)
        router = PaperRouter(fleet)

        def fail(request: GenerateRequest) -> None:
            raise left.pop(0)

        fleet.replicas[ReplicaId("r0")].script = fail
        with pytest.raises(NoReplica):
            await router.hold(copies=1)
        assert left == []
        hold_late(fleet, fleet.requests[0])
        fleet.tell()
        assert router.keeper.pins() == []
        await settle(router)
        assert fleet.replicas[ReplicaId("r0")].pins == {}
        await router.keeper.aclose()

    async def test_more_than_any_could_hold(self, router: PaperRouter) -> None:
        with pytest.raises(PrefixDoesNotFit) as caught:
            await router.hold(MAX_PINNED + 1, copies=1)
        assert (caught.value.needed, caught.value.left) == (MAX_PINNED + 1, MAX_PINNED)
        assert router.fleet.asked == []

    async def test_nobody_to_ask(self) -> None:
        router = PaperRouter(PaperFleet(0))
        with pytest.raises(NoReplica):
            await router.hold()
        await router.keeper.aclose()

    async def test_engines_that_keep_nothing(self) -> None:
        router = PaperRouter(PaperFleet(2, has_prefix_cache=False))
        with pytest.raises(PrefixCachingOff):
            await router.hold()
        await router.keeper.aclose()

    async def test_engines_that_tell_nothing_of_their_blocks_hold_all_the_same(self) -> None:
        router = PaperRouter(PaperFleet(2, has_kv_events=False))
        pin = await router.hold(copies=2)
        assert len(router.fleet.holders(pin)) == 2
        await router.keeper.aclose()

    async def test_full_replicas_are_busy(self, router: PaperRouter) -> None:
        for name in names(0, 1, 2):
            router.routing.on_load(name, load(num_waiting=1000))
        with pytest.raises(AllBusy):
            await router.hold()
        assert router.keeper.pins() == []

    async def test_who_hangs_up_leaves_nothing(self, fleet: PaperFleet, router: PaperRouter) -> None:
        """Also where it was just held: the answer found nobody."""
        making = asyncio.create_task(router.hold(copies=2))
        while not any(replica.pins for replica in fleet.replicas.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await settle(router)
        assert not any(replica.pins for replica in fleet.replicas.values())
        assert router.keeper.pins() == []
