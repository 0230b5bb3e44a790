"""Replicas on paper, and one Router of them."""

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
