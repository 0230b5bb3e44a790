"""The parts of the scheduling benchmark, small: what they measure is there, and targets are judged."""

from __future__ import annotations

import math

import pytest

from benchmarks.schedule import idle, orders, stall, tenants
from benchmarks.schedule.rows import Line, Section, missed
from benchmarks.schedule.virtual_engine import Job, run
from cache.scheduling_order import SchedulingOrder
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.reference import WorkloadRef


def silent(_: str) -> None:
    """Nobody watches."""


def test_the_limit_halves_nothing_but_the_stall() -> None:
    """On the simulated engine the p99 gap is within its target with the limit, and beyond it without."""
    held, free = stall._simulated(None), stall._simulated(math.inf)
    assert held.ratio <= stall.TARGET < free.ratio
    assert held.before_p99_s == pytest.approx(free.before_p99_s, rel=0.1)
    assert held.before_p99_s <= held.without_p99_s  # contexts have grown
    assert held.first_token_s > free.first_token_s


def test_a_greedy_tenant_is_told_from_its_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a short run: told apart, the neighbour is served, and at once."""
    monkeypatch.setattr(tenants, "SECONDS", 20.0)
    monkeypatch.setattr(tenants, "EDGE_S", 5.0)
    apart = tenants._neighbour(run, 7.5, 10.0, are_known=True, seed=0)
    together = tenants._neighbour(run, 7.5, 10.0, are_known=False, seed=0)
    assert apart.num_refused == 0
    assert apart.p99_s < together.p99_s / 4


def test_orders_meet_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "WORKLOAD", WorkloadRef("no_reuse", num_requests=60))
    monkeypatch.setattr(orders, "LOADS", (0.6,))
    monkeypatch.setattr(orders, "BINDINGS", ("late",))
    section = orders.measure(silent, seeds=2)
    assert len(section.lines) == len(SchedulingOrder)
    first_come = [line for line in section.lines if line.case.endswith("first_come")]
    assert [line.cells[2] for line in first_come] == ["1.000 ± 0.000"]


def test_steps_are_begun_ahead_where_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are the machine's; what is compared is not."""
    monkeypatch.setattr(idle, "STEP_S", 0.0001)
    monkeypatch.setattr(idle, "BATCHES", (4,))
    monkeypatch.setattr(idle, "OUTPUT_TOKENS", 20)
    section = idle.measure(silent, repeats=1)
    assert [line.cells[0] for line in section.lines] == ["0%", "95%"]


def test_jobs_that_find_no_room_have_no_first_token() -> None:
    """More than may wait: the others are served."""
    jobs = [Job(0.0, 400, 2, "one", "one") for _ in range(400)]
    outcome = run(jobs, H100_8B.step_time(), num_blocks=25_000)
    assert outcome.num_ended == sum(wait_s < math.inf for wait_s in outcome.first_token_s) < 400


def test_only_missed_targets_are_named() -> None:
    lines = [Line("a", ("1",)), Line("b", ("2",), "at most 1"), Line("c", ("3",), "at most 1", False)]
    assert missed([Section("title", ("value",), lines)]) == ["title: c: wanted at most 1"]
