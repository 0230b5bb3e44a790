"""Several Routers of one fleet on paper, and what tests of them do and ask."""

from __future__ import annotations

import asyncio

from cache.types import PinId
from router.prefixes.prefix import PinnedPrefix
from tests.fakes.prefixes import PaperFleet, PaperRouter, settle


def gate(fleet: PaperFleet) -> asyncio.Event:
    """No replica computes anything until it is set."""
    opened = asyncio.Event()
    for replica in fleet.replicas.values():
        replica.gate = opened
    return opened


async def being_remade(routers: list[PaperRouter], **options: object) -> tuple[PinId, asyncio.Event]:
    """The first Router's pin, whose only copy has died and is being made again, until the event is set."""
    fleet = routers[0].fleet
    pin_id = PinId(await routers[0].hold(**{"copies": 1, "seconds": 600.0, **options}))
    await settle(routers[0])
    (holder,) = fleet.holders(pin_id)
    opened = gate(fleet)
    fleet.lose(holder)
    await settle(routers[0])
    assert fleet.holders(pin_id) == []
    return pin_id, opened


async def ids(router: PaperRouter, owner: str = "alice") -> list[PinId]:
    return [pin.pin_id for pin in await router.directory.pins(owner)]


async def find(router: PaperRouter, pin_id: str) -> PinnedPrefix:
    return await router.directory.find(pin_id, "alice")


async def settle_all(routers: list[PaperRouter]) -> None:
    for _ in range(3):
        for router in routers:
            await settle(router)
