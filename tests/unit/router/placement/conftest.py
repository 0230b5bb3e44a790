"""Two replicas on paper under one Routing."""

from __future__ import annotations

import pytest

from tests.fakes.routing import RoutingBench


@pytest.fixture
def bench() -> RoutingBench:
    return RoutingBench()
