"""Replicas on paper, and one Router of them, or several."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.prefixes import PaperFleet, PaperRouter


@pytest.fixture
def fleet() -> PaperFleet:
    return PaperFleet()


@pytest.fixture
async def router(fleet: PaperFleet) -> AsyncIterator[PaperRouter]:
    made = PaperRouter(fleet)
    yield made
    await made.keeper.aclose()


@pytest.fixture
async def routers() -> AsyncIterator[list[PaperRouter]]:
    """Three Routers of one fleet."""
    fleet = PaperFleet(4)
    made = [PaperRouter(fleet) for _ in range(3)]
    yield made
    for router in made:
        await router.directory.aclose()
        await router.keeper.aclose()
