"""Held prefixes whatever dies: each that can be kept is kept by one Router, and held as often as was wanted.

Routers die, stand still and come back, replicas die and come, clients give back; then it is quiet. Meanwhile
each Router knows what any of them keeps.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ServingError
from cache.types import PinId, ReplicaId
from router.prefixes.succession import GONE_AFTER_S, LOOK_INTERVAL_S
from tests.fakes.prefixes import PaperFleet, PaperRouter
from tests.fakes.router import load

NUM_REPLICAS = 4
SECONDS = 10_000.0  # that everything is held for
QUIET_S = 4 * GONE_AFTER_S


@dataclass
class World:
    """Routers and replicas on paper, and what should be held."""

    fleet: PaperFleet = field(default_factory=lambda: PaperFleet(NUM_REPLICAS))
    living: list[PaperRouter] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)  # of the living: they stand still
    wanted: dict[PinId, int] = field(default_factory=dict)
    # Given back while its keeper stood still, through whom: that one remembers it.
    untold: dict[PinId, PaperRouter] = field(default_factory=dict)
    unknowable: set[PinId] = field(default_factory=set)  # of those, where that one died
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(NUM_REPLICAS))

    def join(self) -> None:
        router = PaperRouter(self.fleet)
        self.living.append(router)

    def running(self) -> list[PaperRouter]:
        return [router for router in self.living if router.name not in self.stopped]

    def keepers(self, pin_id: PinId) -> list[str]:
        return [router.name for router in self.living if router.keeper.keeps(pin_id)]

    async def hold(self, router: PaperRouter, copies: int) -> None:
        try:
            self.wanted[PinId(await router.hold(1, copies=copies, seconds=SECONDS))] = copies
        except ServingError:
            return  # no room, or nobody heard of for too long: nothing is held
        self.fleet.tell()

    async def give_back(self, router: PaperRouter, pick: int) -> None:
        if pins := await router.directory.pins("alice"):
            pin = pins[pick % len(pins)]
            if not any(each.keeper.keeps(pin.pin_id) for each in self.running()):
                self.untold[pin.pin_id] = router
            await router.directory.give_back(pin)
            self.wanted.pop(pin.pin_id, None)
            self.fleet.tell()

    async def kill_router(self, router: PaperRouter) -> None:
        self.fleet.silent.add(router.name)
        self.stopped.discard(router.name)
        self.living.remove(router)
        self.fleet.routers.remove(router)
        await router.directory.aclose()
        await router.keeper.aclose()
        self.unknowable |= {pin_id for pin_id, asked in self.untold.items() if asked is router}
        self.join()
        self._forget_lost()

    def kill_replica(self, pick: int) -> None:
        self.fleet.lose(sorted(self.fleet.replicas)[pick % len(self.fleet.replicas)])
        self.fleet.join(ReplicaId(f"r{next(self.numbers)}"))
        self._forget_lost()

    def _forget_lost(self) -> None:
        for pin_id in list(self.wanted):
            if not self.fleet.holders(pin_id) and not self.keepers(pin_id):
                del self.wanted[pin_id]  # with its last copy, and nobody who knew it

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_INTERVAL_S)):
            self.fleet.clock.advance(LOOK_INTERVAL_S)
            self.fleet.tell()
            for router in self.running():
                for name in self.fleet.replicas:
                    router.routing.on_load(name, load())
                router.keeper.look()
            await asyncio.gather(*[router.succession.look() for router in self.running()])
            for _ in range(30):
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        for router in self.living:
            await router.directory.aclose()
            await router.keeper.aclose()

    async def check_that_all_know(self) -> None:
        """Whatever a Router that answers keeps, and nobody has given back."""
        for pin_id in self.wanted:
            if any(router.keeper.keeps(pin_id) for router in self.running()):
                for router in self.running():
                    assert (await router.directory.find(pin_id, "alice")).pin_id == pin_id
                    assert pin_id in [pin.pin_id for pin in await router.directory.pins("alice")]


Act = tuple[str, int, int]
acts = st.lists(
    st.tuples(
        st.sampled_from(
            ("hold", "give back", "kill Router", "stop", "go on", "kill replica", "wait", "wait")
        ),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    max_size=14,
)


async def play(script: list[Act]) -> World:
    world = World()
    for _ in range(3):
        world.join()
    for what, which, pick in script:
        router = world.living[which]
        match what:
            case "hold" if router.name not in world.stopped and len(world.wanted) < 2:
                await world.hold(router, copies=1 + pick % 3)
            case "give back" if router.name not in world.stopped:
                await world.give_back(router, pick)
            case "kill Router":
                await world.kill_router(router)
            case "stop":
                world.stopped.add(router.name)
                world.fleet.silent.add(router.name)
            case "go on":
                world.stopped.discard(router.name)
                world.fleet.silent.discard(router.name)
            case "kill replica":
                world.kill_replica(pick)
            case "wait":
                await world.pass_time(LOOK_INTERVAL_S * (1 + 2 * pick))
        await world.check_that_all_know()
    for router in world.living:
        world.stopped.discard(router.name)
        world.fleet.silent.discard(router.name)
    await world.pass_time(QUIET_S)
    return world


@given(acts)
def test_what_can_be_kept_is_kept_by_one_and_held_as_often_as_was_wanted(script: list[Act]) -> None:
    async def run() -> None:
        world = await play(script)
        try:
            for pin_id, copies in world.wanted.items():
                assert len(world.keepers(pin_id)) == 1, pin_id
                assert len(world.fleet.holders(pin_id)) == copies, pin_id
            held = {pin for replica in world.fleet.replicas.values() for pin in replica.pins}
            assert held - world.unknowable == set(world.wanted), "held, and nobody wants it"
        finally:
            await world.aclose()

    asyncio.run(run())
