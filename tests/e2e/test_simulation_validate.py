"""Real replicas in processes of their own beside their simulation, on a small scale.

How long things take is for `python -m loadtest simulate --validate`; here, what does not depend on that.
"""

from __future__ import annotations

import pytest
from rich.console import Console

from loadtest.simulation.real_fleet import FleetFailed, RealFleet
from loadtest.simulation.validate import BLOCK_TOKENS, CONFIG, Form, compare
from loadtest.workloads.request import Workload, WorkRequest

NUM_REQUESTS = 24

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


async def test_both_worlds_serve_the_same_requests_and_find_the_same_blocks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Round robin places alike whatever the time, so every request's hit is the same, token for token. And
    late binding is compared with late binding: requests that nobody has room for wait at the router on both
    sides; all of them end.

    Round robin first: replicas have nothing cached then that another form left there.
    """
    forms = (Form("round_robin"), Form("expected_time", "late"))
    turns, late = await compare(Console(quiet=True), num_requests=NUM_REQUESTS, num_replicas=2, forms=forms)
    assert turns.real_cached_tokens.tolist() == turns.simulated_cached_tokens.tolist()
    assert late.label == "expected_time+late"
    for each in (turns, late):
        assert each.real_cached_tokens.sum() > 0
        for times in (each.real_ttft_s, each.simulated_ttft_s):
            assert times.shape == (NUM_REQUESTS,)
            assert (times > 0).all()
    assert turns.stolen < 1.0
    assert "Loading weights" not in capfd.readouterr().err  # each replica showed a bar of its own there


async def test_a_request_that_a_replica_refuses_ends_the_comparison() -> None:
    """Never a table with holes in it."""
    too_long = 200 * BLOCK_TOKENS  # of a cache of 192 blocks
    work = Workload("test", BLOCK_TOKENS, (WorkRequest(0.0, too_long, 2, tuple(range(200)), 0),))
    async with RealFleet(CONFIG, 1) as fleet:
        with pytest.raises(FleetFailed, match="request"):
            await fleet.run(work, policy="round_robin", seed=0, salt="refused")
