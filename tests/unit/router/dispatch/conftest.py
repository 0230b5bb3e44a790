"""A Router whose replicas follow the tests' scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.http import RouterUnderTest


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest(num_replicas=3, max_attempts=4, max_deaths=3) as under_test:
        yield under_test
