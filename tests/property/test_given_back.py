"""What was given back stays so, whatever is lost or late: no replica holds it, and no Router tells of it.

Two Routers share replicas that calls, answers and reports miss for a while, that die and come; Routers
leave and die. It is remembered while one lives that heard of it, or was told of it by one that left. Where
its keeper may not have heard of it, or its client left before it was held, only the one that was asked
counts, and whom it told as it left.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ServingError
from cache.messages import GenerateRequest
from cache.types import PinId, ReplicaId
from router.prefixes.keeper import LOOK_INTERVAL_S
from router.prefixes.succession import GONE_AFTER_S
from router.prefixes.tombstones import FORGET_S
from tests.fakes.prefixes import PaperFleet, PaperRouter, hold_late
from tests.fakes.router import load

NUM_REPLICAS = 3
SECONDS = 10_000.0  # that everything is held for
LONG_S = FORGET_S + 2.0
QUIET_S = 2.0 * GONE_AFTER_S


@dataclass
class World:
    """Routers and replicas on paper, and what was given back."""

    fleet: PaperFleet = field(default_factory=lambda: PaperFleet(NUM_REPLICAS))
    late: list[GenerateRequest] = field(default_factory=list)  # that replicas go on with, unasked
    knowing: dict[PinId, set[str]] = field(default_factory=dict)  # of what was given back: who heard of it
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(NUM_REPLICAS))

    @property
    def routers(self) -> list[PaperRouter]:
        return self.fleet.routers

    def a_replica(self, pick: int) -> ReplicaId:
        """One that holds something, if any does."""
        names = sorted(name for name, replica in self.fleet.replicas.items() if replica.pins)
        return (names or sorted(self.fleet.replicas))[pick % len(names or self.fleet.replicas)]

    def cut_off(self, pick: int) -> None:
        """Calls to a replica, what it says, or both do not get there."""
        name = self.a_replica(pick // 3)
        if pick % 3 != 1:
            self.fleet.deaf.add(name)
        if pick % 3 != 0:
            self.fleet.mute.add(name)

    async def hold(self, router: PaperRouter, copies: int) -> None:
        try:
            await router.hold(1, copies=copies, seconds=SECONDS)
        except ServingError:
            return  # not enough replicas could be asked
        self.fleet.tell()

    async def give_back(self, router: PaperRouter) -> None:
        for pin in (await router.directory.pins("alice"))[:1]:
            await router.directory.give_back(pin)
            self.knowing[pin.pin_id] = {each.name for each in self.routers}

    async def give_back_unheard(self, router: PaperRouter) -> None:
        """Every other Router hangs, its keeper perhaps among them: who was asked knows of it alone."""
        for pin in (await router.directory.pins("alice"))[:1]:
            self.fleet.silent |= {each.name for each in self.routers} - {router.name}
            await router.directory.give_back(pin)
            self.fleet.silent.clear()
            self.knowing[pin.pin_id] = {router.name}

    async def give_up(self, router: PaperRouter, asked: PaperRouter | None = None) -> None:
        """Its client leaves while it is computed, or gives it back through `asked`; its replica goes on."""
        fleet, opened = self.fleet, asyncio.Event()
        num_asked = len(fleet.requests)
        for replica in fleet.replicas.values():
            replica.gate = opened
        making = asyncio.create_task(self.hold(router, copies=1))
        for _ in range(30):
            await asyncio.sleep(0)
        for request in fleet.requests[num_asked:]:
            assert request.pin is not None
            self.knowing[request.pin.pin_id] = {router.name}
            self.late.append(request)
        for pin in await asked.directory.pins("alice") if asked is not None else ():
            if pin.pin_id in self.knowing:
                await asked.directory.give_back(pin)
                self.knowing[pin.pin_id] = {each.name for each in self.routers}
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        for replica in fleet.replicas.values():
            replica.gate = None

    def compute_late(self) -> None:
        """What was given up."""
        for request in self.late:
            if request.ranks[0] in self.fleet.replicas:
                hold_late(self.fleet, request)
        self.late.clear()

    async def leave(self, router: PaperRouter) -> None:
        """As in a rolling update: the next one is there before."""
        PaperRouter(self.fleet)
        await router.directory.hand_on()
        await router.keeper.hand_on()
        for pin_id in self.knowing.keys() & router.keeper.given_back().seconds.keys():
            self.knowing[pin_id] |= {each.name for each in self.routers}
        await self.kill(router)

    async def kill(self, router: PaperRouter) -> None:
        self.routers.remove(router)
        await router.directory.aclose()
        await router.keeper.aclose()
        for names in self.knowing.values():
            names.discard(router.name)
        if len(self.routers) < 2:
            PaperRouter(self.fleet)

    def replace_replica(self, name: ReplicaId) -> None:
        self.fleet.lose(name)
        self.fleet.join(ReplicaId(f"r{next(self.numbers)}"))

    def heal(self) -> None:
        self.fleet.deaf.clear()
        self.fleet.mute.clear()

    async def pass_time(self, seconds: float) -> None:
        for step in range(round(seconds / LOOK_INTERVAL_S)):
            self.fleet.clock.advance(LOOK_INTERVAL_S)
            self.fleet.tell()
            for router in self.routers:
                for name in self.fleet.replicas:
                    router.routing.on_load(name, load())
                router.keeper.look()
            if step % 4 == 3:
                await asyncio.gather(*[router.succession.look() for router in self.routers])
            for _ in range(30):
                await asyncio.sleep(0)

    def check_that_nobody_tells(self) -> None:
        """Of those that heard of it."""
        for router in self.routers:
            told = {pin.pin_id for pin in router.keeper.pins()}
            assert not [
                pin_id for pin_id in told & self.knowing.keys() if router.name in self.knowing[pin_id]
            ]


Act = tuple[str, int, float]
kinds = st.sampled_from(
    (
        *("hold", "give back", "give back unheard", "give back early", "give up", "compute late"),
        *("cut off", "give back, cut off", "heal", "leave", "kill", "replace"),
    )
)
acts = st.lists(
    st.tuples(kinds, st.integers(0, 5), st.sampled_from((0.0, LOOK_INTERVAL_S, LONG_S))),
    min_size=4,
    max_size=12,
)


async def play(script: list[Act]) -> World:
    world = World()
    for _ in range(2):
        PaperRouter(world.fleet)
    await world.hold(world.routers[0], copies=2)
    for what, pick, wait_s in script:
        router = world.routers[pick % 2]
        match what:
            case "hold":
                await world.hold(router, copies=1 + pick % 3)
            case "give back":
                await world.give_back(router)
            case "give back unheard":
                await world.give_back_unheard(router)
            case "give back early":
                await world.give_up(router, asked=world.routers[pick // 2 % 2])
            case "give up":
                await world.give_up(router)
            case "compute late":
                world.compute_late()
            case "cut off":
                world.cut_off(pick)
            case "give back, cut off":
                world.cut_off(pick)
                await world.give_back(router)
            case "heal":
                world.heal()
            case "leave":
                await world.leave(router)
            case "kill":
                await world.kill(router)
            case "replace":
                world.replace_replica(world.a_replica(pick))
        await world.pass_time(wait_s)
        world.check_that_nobody_tells()
    world.heal()
    world.compute_late()
    await world.pass_time(QUIET_S)
    return world


@given(acts)
def test_what_was_given_back_stays_so(script: list[Act]) -> None:
    async def run() -> None:
        world = await play(script)
        try:
            world.check_that_nobody_tells()
            for pin_id, names in world.knowing.items():
                if names:
                    assert not world.fleet.holders(pin_id), pin_id
                    assert not [each.name for each in world.routers if each.keeper.keeps(pin_id)], pin_id
        finally:
            for router in list(world.routers):
                await router.directory.aclose()
                await router.keeper.aclose()

    asyncio.run(run())
