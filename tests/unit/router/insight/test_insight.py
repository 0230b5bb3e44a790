"""Watchers are put together with what they need to know of this Router."""

from __future__ import annotations

import random

import pytest

from cache.types import RequestId
from router.insight.insight import Insight
from router.placement.routing import Routing
from tests.fakes.router import FakeClock, config, info, load, query, replica_id

NO_DRAW = {"near_tie": 0.0}  # the two policies draw from chance of their own


@pytest.mark.parametrize("place", [(0, 1), (0, 2), (1, 2)])
def test_a_shadow_of_the_live_policy_agrees_with_it(place: tuple[int, int]) -> None:
    """Also beside other Routers: without its place among them it disagreed with every second decision."""
    clock, rng = FakeClock(), random.Random(1)
    settings = config(policy_options=NO_DRAW, shadow_policy="expected_time", shadow_policy_options=NO_DRAW)
    routing = Routing(settings, clock=clock, peers=lambda: place)
    insight = Insight(settings, routing, doubt=lambda _: None, clock=clock, wall_clock=lambda: 0.0)
    replicas = [replica_id(index) for index in range(8)]
    routing.update_replicas({each: info() for each in replicas})
    for number in range(100):
        for each in replicas:
            routing.on_load(each, load(queued_uncached_tokens=rng.randrange(1, 20)))
        routing.choose(query(f"q{number}"))
        clock.advance(1.0)
        routing.finish(RequestId(f"q{number}"))
    shadow = insight.totals().shadow
    assert shadow is not None
    assert (shadow.agreed, shadow.disagreed) == (100, 0)
