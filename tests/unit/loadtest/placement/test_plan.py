"""Fleets for recordings that are worked out by hand: who counts, and what the promise means for a few."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.placement.plan import Fleet, PlanRequest, busiest, smallest_fleet, warmed
from loadtest.workloads.reference import WorkloadRef
from tests.fakes.simulation import unrelated

CACHE_TOKENS = 400_000


def planned(folder: Path, requests: Sequence[tuple[float, int]], ttft_s: float, **changes: int) -> Fleet:
    """requests: when each comes, and tokens of its prompt; none of them shares anything."""
    lines: list[dict[str, object]] = [{"format": "warmpath-trace", "version": 2}]
    for number, (time_s, tokens) in enumerate(requests):
        blocks = [f"{number:x}{block:04x}" for block in range(tokens // 512)]
        lines.append({"t": time_s, "input": tokens, "output": 4, "blocks": blocks, "block_size": 512})
    trace = folder / "recording.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    request = PlanRequest(WorkloadRef(str(trace)), ttft_s, cache_tokens=(CACHE_TOKENS,), **changes)  # type: ignore[arg-type]
    return smallest_fleet(request, CACHE_TOKENS)


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


def test_what_came_before_the_busiest_stretch_warms_the_caches(tmp_path: Path) -> None:
    times = [*(60.0 * number for number in range(20)), *(1200.0 + number for number in range(14)), 9000.0]
    trace = unrelated(*((time_s, 600, 4) for time_s in times))
    stretch, (whole, num_warming) = busiest(trace, 14), warmed(trace, 14)
    assert [request.arrival_s for request in stretch.requests] == [float(number) for number in range(14)]
    assert num_warming == 2  # with them an eighth of the requests, as in a comparison
    assert [request.arrival_s for request in whole.requests[:3]] == [0.0, 60.0, 120.0]
    assert len(whole.requests) == 16
    fleet = planned(tmp_path, [(time_s, 600) for time_s in times], 1.0, num_requests=14)
    assert fleet.summary.num_requests == 14


@pytest.mark.parametrize("num_requests", [3, 4])
def test_of_a_short_trace_all_of_it_is_the_busiest(num_requests: int) -> None:
    trace = unrelated((5.0, 600, 4), (6.0, 600, 4), (9.0, 600, 4))
    stretch = busiest(trace, num_requests)
    assert [request.arrival_s for request in stretch.requests] == [0.0, 1.0, 4.0]
    assert warmed(trace, num_requests) == (stretch, 0)
