"""Spreading arrivals over the ticks of a trace's clock: who moves, how far, and who does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.placement.suites import EXCERPT
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload
from loadtest.workloads.ticks import spread_over_ticks
from tests.fakes.simulation import unrelated


def _at(*times_s: float) -> Workload:
    return unrelated(*((time_s, 10, 1) for time_s in times_s))


def test_those_of_one_instant_are_spread_evenly_over_the_tick() -> None:
    """Worked by hand: ticks of 3 s, three requests at 0, none at 3, two at 6, one at 9."""
    spread = spread_over_ticks(_at(0.0, 0.0, 0.0, 6.0, 6.0, 9.0))
    assert [request.arrival_s for request in spread.requests] == [0.0, 1.0, 2.0, 6.0, 7.5, 9.0]


def test_a_quiet_time_is_not_filled() -> None:
    """A crowd before a pause of ten ticks still comes within its own."""
    spread = spread_over_ticks(_at(0.0, 3.0, 3.0, 33.0))
    assert [request.arrival_s for request in spread.requests] == [0.0, 3.0, 4.5, 33.0]


def test_answers_to_one_prompt_stay_together() -> None:
    work = _at(0.0, 0.0, 0.0, 3.0)
    pairs = zip(work.requests, (0, 1, 0, 0), strict=True)
    branches = [replace(request, branch=branch) for request, branch in pairs]
    spread = spread_over_ticks(replace(work, requests=tuple(branches)))
    assert [request.arrival_s for request in spread.requests] == [0.0, 0.0, 1.5, 3.0]


@pytest.mark.parametrize("times_s", [(), (0.0,), (5.0, 5.0, 5.0)])
def test_a_trace_without_a_tick_stays_as_it_is(times_s: tuple[float, ...]) -> None:
    workload = _at(*times_s)
    assert spread_over_ticks(workload) == workload


@given(st.lists(st.integers(0, 30), max_size=40))
def test_nothing_but_times_changes_and_nobody_passes_another(ticks: list[int]) -> None:
    workload = _at(*(3.0 * tick for tick in ticks))
    spread = spread_over_ticks(workload)
    times = [request.arrival_s for request in spread.requests]
    assert times == sorted(times)
    for before, after in zip(workload.requests, spread.requests, strict=True):
        assert (before.block_ids, before.input_tokens, before.session) == (
            after.block_ids,
            after.input_tokens,
            after.session,
        )
        assert 0.0 <= after.arrival_s - before.arrival_s
    instants = {request.arrival_s for request in workload.requests}
    if len(instants) > 1:  # two different requests never come at one instant any more
        assert len(set(times)) == len(times)


def test_the_published_trace_is_spread_when_asked_for() -> None:
    """Its clock ticks every 3 s, give or take a millisecond. Both kinds may stand in one table, under names
    of their own."""
    published, spread = (WorkloadRef(str(EXCERPT), spread_ticks=flag) for flag in (False, True))
    times, spread_times = (
        [request.arrival_s for request in reference.trace().requests] for reference in (published, spread)
    )
    assert len(times) > 9 * len(set(times))
    assert len(spread_times) == len(set(spread_times))
    moved_s = [after - before for before, after in zip(times, spread_times, strict=True)]
    assert 0.0 == min(moved_s) < 2.0 < max(moved_s) < 3.0
    assert published.label != spread.label


def test_generated_arrivals_have_no_ticks() -> None:
    with pytest.raises(ValueError, match="no_reuse"):
        WorkloadRef("no_reuse", spread_ticks=True)
