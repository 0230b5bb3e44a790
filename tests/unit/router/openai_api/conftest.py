"""The Router most tests of this folder ask: two replicas that count, every setting at its default."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.http import RouterUnderTest


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest() as under_test:
        yield under_test
