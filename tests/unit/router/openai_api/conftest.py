"""The Routers that most tests of this folder ask: two replicas that count, without API keys and with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.guarded import settings
from tests.fakes.http import RouterUnderTest


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest() as under_test:
        yield under_test


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest(tenants=settings(tmp_path), expose_debug=True) as router:
        yield router
