"""How long a newcomer waits for blocks; the laws of levels are in `tests/property/test_admission.py`."""

from __future__ import annotations

import pytest

from router.pricing.fleet_load import FleetLoad
from router.pricing.waiting import start_s
from tests.fakes.router import BLOCK_SIZE, FakeClock, info, load, replica_id

A = replica_id(0)


def wait_s(num_waiting: int, needed_blocks: int) -> float:
    """Behind prompts of so many blocks. Four run, for 80 s each; nobody grows into 400 of the free blocks."""
    clock = FakeClock()
    loads = FleetLoad(clock, reservation_ttl_s=600.0, silent_after_s=5.0)
    loads.add_replica(A, info())
    loads.residence.observe(80.0)
    said = load(
        total_blocks=1200,
        free_blocks=800,
        growth_blocks=400,
        num_running=4,
        num_waiting=num_waiting,
        queued_uncached_tokens=needed_blocks * BLOCK_SIZE,
    )
    loads.report(A, said)
    return start_s(loads[A].state(), clock(), loads.residence, max_wait_s=10.0)


def test_of_prompts_that_do_not_fit_as_many_have_to_end() -> None:
    """A quarter of what two need is there: one and a half of four have to end, and one ends in 20 s."""
    assert wait_s(2, 1600) == pytest.approx(30.0)
    assert wait_s(2, 3200) == pytest.approx(35.0)


def test_prompts_that_fit_wait_for_nobody_to_end() -> None:
    assert wait_s(1, 300) < 1.0
    assert wait_s(0, 0) == 0.0
