"""Real replicas behind one router and behind two, on a small scale; how long it takes is not asked here."""

from __future__ import annotations

import pytest
from rich.console import Console

from loadtest.simulation.several_routers import measure

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


async def test_two_routers_serve_what_one_serves_bound_late() -> None:
    """Every request ends with its last token, whoever sent it, or the comparison would have ended."""
    result = await measure(
        Console(quiet=True), (1, 2), num_rounds=1, binding="late", num_requests=12, num_replicas=2
    )
    one, two = result.turns[0]
    assert (one.num_routers, two.num_routers) == (1, 2)
    assert one.hit_ratio > 0
    assert two.hit_ratio > 0
    assert result.beside_one(2).estimate == pytest.approx(two.mean_ttft_s / one.mean_ttft_s)
