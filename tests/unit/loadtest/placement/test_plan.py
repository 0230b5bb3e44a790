"""Fleets for recordings that are worked out by hand: who counts, and what the promise means for a few."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.placement import plan
from loadtest.placement.errors import PlacementError
from loadtest.placement.plan import Fleet, PlanRequest, make_plan, smallest_fleet, whole_trace
from loadtest.workloads.reference import WorkloadRef
from tests.fakes.placement import die

CACHE_TOKENS = 400_000


def asked(folder: Path, requests: Sequence[tuple[float, int]], ttft_s: float, **changes: int) -> PlanRequest:
    """requests: when each comes, and tokens of its prompt; none of them shares anything."""
    lines: list[dict[str, object]] = [{"format": "warmpath-trace", "version": 2}]
    for number, (time_s, tokens) in enumerate(requests):
        blocks = [f"{number:x}{block:04x}" for block in range(tokens // 512)]
        lines.append({"t": time_s, "input": tokens, "output": 4, "blocks": blocks, "block_size": 512})
    trace = folder / "recording.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    return PlanRequest(WorkloadRef(str(trace)), ttft_s, cache_tokens=(CACHE_TOKENS,), **changes)  # type: ignore[arg-type]


def planned(folder: Path, requests: Sequence[tuple[float, int]], ttft_s: float, **changes: int) -> Fleet:
    return smallest_fleet(asked(folder, requests, ttft_s, **changes), CACHE_TOKENS)


def test_who_comes_first_in_a_recording_counts(tmp_path: Path) -> None:
    """One replica takes 1.6 s for eight prompts that come together, and nobody waits after them."""
    together = [(0.0, 6_000)] * 8
    later = [(10.0 + 2.0 * number, 1_000) for number in range(60)]
    fleet = planned(tmp_path, [*together, *later], 1.0)
    assert fleet.num_replicas == 2
    assert fleet.summary.num_requests == 68


def test_one_of_sixty_is_more_than_one_of_a_hundred(tmp_path: Path) -> None:
    """Its 4.5 s are above the promise, whatever lies between it and the next."""
    short = [(10.0 * number, 600) for number in range(60)]
    fleet = planned(tmp_path, [*short, (600.0, 60_000)], 3.0, max_replicas=2)
    assert fleet.num_replicas is None
    assert fleet.summary.p99_ttft_s > 4.0
    assert fleet.one_more_p99_ttft_s is None


def test_what_one_replica_more_would_do_is_known(tmp_path: Path) -> None:
    """Three prompts at once on two replicas: one waits for another. On a third nobody waits."""
    fleet = planned(tmp_path, [(0.0, 6_000)] * 3, 0.5)
    assert fleet.num_replicas == 2
    assert fleet.one_more_p99_ttft_s is not None
    assert 0.2 < fleet.one_more_p99_ttft_s < 0.3 < fleet.summary.p99_ttft_s


def test_what_came_before_the_busiest_stretch_warms_the_caches(tmp_path: Path) -> None:
    times = [*(60.0 * number for number in range(20)), *(1200.0 + number for number in range(14)), 9000.0]
    fleet = planned(tmp_path, [(time_s, 600) for time_s in times], 1.0, num_requests=14)
    assert (fleet.stretch.first, fleet.stretch.num_warming) == (20, 2)
    assert fleet.summary.num_requests == 14


SHORT_ONES = [(0.1 * number, 600) for number in range(20)]
LONG_ONES = [(100.0 + 0.25 * number, 20_000) for number in range(20)]


def test_few_long_prompts_are_planned_for_where_they_are_more_work(tmp_path: Path) -> None:
    """It was one replica: ten short prompts a second were the busiest, and 0.9 s of work four times a second
    were not looked at."""
    fleet = planned(tmp_path, [*SHORT_ONES, *LONG_ONES], 2.0, num_requests=20)
    assert (fleet.stretch.first, fleet.stretch.began_s) == (20, 100.0)
    assert fleet.num_replicas == planned(tmp_path, LONG_ONES, 2.0, num_requests=20).num_replicas == 4


def test_the_rest_of_the_trace_is_tried_as_well(tmp_path: Path) -> None:
    """One replica keeps 1 s where the work per second is highest, and not where eight come at once."""
    steady = [(float(number), 20_000) for number in range(10)]
    burst = [(100.0, 6_000)] * 8
    later = [(200.0 + 60.0 * number, 600) for number in range(12)]
    request = asked(tmp_path, [*steady, *burst, *later], 1.0, num_requests=10)
    fleet = smallest_fleet(request, CACHE_TOKENS)
    assert (fleet.num_replicas, fleet.stretch.first) == (1, 0)
    whole = whole_trace(request, request.trace.trace(), [fleet])
    assert whole is not None
    assert whole.num_requests == 30
    assert whole.worst_p99_ttft_s == whole.p99_ttft_s > 1.5
    assert whole.worst_began_s == 8.0  # the eight are among ten from there on


@pytest.mark.parametrize("num_requests", [2, 20, 1_000])
def test_a_trace_far_longer_than_its_stretch_and_one_no_longer_are_not_tried_whole(
    num_requests: int, tmp_path: Path
) -> None:
    request = asked(tmp_path, [*SHORT_ONES, (9.0, 600)], 1.0, num_requests=num_requests)
    fleet = smallest_fleet(request, CACHE_TOKENS)
    assert (whole_trace(request, request.trace.trace(), [fleet]) is not None) == (num_requests == 20)


def test_a_process_that_is_killed_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback."""
    monkeypatch.setattr(plan, "smallest_fleet", die)
    with pytest.raises(PlacementError, match="--workers 1"):
        make_plan(asked(tmp_path, [(0.0, 600), (1.0, 600)], 1.0), num_workers=1)
