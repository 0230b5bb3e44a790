"""What a plan's files say: what was asked for, to the last constant, and what came out."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest.placement import plan_report
from loadtest.placement.errors import NotWritten
from loadtest.placement.experiment import Output
from loadtest.placement.plan import Plan, PlanRequest, smallest_fleet
from loadtest.placement.plan_report import document, run_plan, tables
from loadtest.placement.policy_choice import parse_policy
from loadtest.placement.stack_distance import hit_curve
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.reference import WorkloadRef

LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


@pytest.fixture
def request_(tmp_path: Path) -> PlanRequest:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(LINE % (3000 * (number // 2)) for number in range(6)))
    return PlanRequest(WorkloadRef(str(trace)), 5.0, cache_tokens=(10_240,))


def planned(request: PlanRequest) -> Plan:
    trace = request.trace.trace()
    fleets = tuple(smallest_fleet(request, size) for size in request.cache_tokens)
    return Plan(trace, hit_curve(trace), fleets, None)


def written(request: PlanRequest) -> dict[str, Any]:
    request = replace(request, trace=request.trace.as_it_is())
    found: dict[str, Any] = json.loads(json.dumps(document(request, planned(request)), allow_nan=False))
    return found


def test_what_is_never_reused_has_no_hit_rate(request_: PlanRequest, tmp_path: Path) -> None:
    """A table of caches of 0 tokens and a flat line were shown."""
    assert len(tables(request_, planned(request_))) == 2
    assert written(request_)["hit_rate"] is not None
    new = [LINE.replace("[1, 2]", f"[{number}, {number + 1}]") % (3000 * number) for number in range(0, 6, 2)]
    Path(request_.trace.source).write_text("".join(new))
    assert len(tables(request_, planned(request_))) == 1
    assert written(request_)["hit_rate"] is None


def test_a_plan_tells_its_request_and_its_stretch(request_: PlanRequest) -> None:
    found = written(request_)
    assert found["request"]["trace"] == request_.trace.source
    assert found["request"]["ttft_p99_s"] == 5.0
    assert found["request"]["policy"] == "expected_time+late+shortest"
    assert found["request"]["machine"]["scheduling_order"] == "shortest_preempting"
    assert found["request"]["machine"]["itl_target_s"] == "inf"
    assert found["fleets"][0]["stretch"]["num_requests"] == 6
    assert found["fleets"][0]["num_replicas"] == 1


def test_a_stretch_at_one_instant_is_json(request_: PlanRequest) -> None:
    assert written(replace(request_, num_requests=2))["fleets"][0]["stretch"]["engines"] == "inf"


def test_plans_of_different_requests_are_told_apart(request_: PlanRequest, tmp_path: Path) -> None:
    """Neither the trace nor what it had to keep was there."""
    requests = [
        request_,
        replace(request_, trace=replace(request_.trace, spread_ticks=True)),
        replace(request_, ttft_p99_s=4.0),
        replace(request_, cache_tokens=(20_480,)),
        replace(request_, num_requests=100),
        replace(request_, max_replicas=9),
        replace(request_, policy=parse_policy("expected_time:near_tie=0.2")),
        replace(request_, machine=replace(H100_8B, base_s=0.0065000001)),
        replace(request_, machine=replace(H100_8B, itl_target_s=None)),
    ]
    asked = [json.dumps(written(each)["request"]) for each in requests]
    Path(request_.trace.source).write_text("".join(LINE % (3000 * number) for number in range(6)))
    asked.append(json.dumps(written(request_)["request"]))
    assert len(set(asked)) == len(asked)


def test_nothing_reused_is_said_and_not_drawn(
    request_: PlanRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(request_.trace.source).write_text(LINE % 0 + (LINE % 3000).replace("[1, 2]", "[3, 4]"))
    monkeypatch.setattr(plan_report, "make_plan", lambda request, num_workers: planned(request))
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "hit-rate.png").write_text("of yesterday")
    said = StringIO()
    run_plan(request_, Output(report=tmp_path / "report"), Console(file=said, width=200))
    assert "Nothing is ever reused" in said.getvalue()
    assert "1 replica of 0.0102M tokens keeps p99" in said.getvalue()
    assert "least-recently-used" not in said.getvalue()
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["plan.json"]


def test_a_plan_that_cannot_be_written_is_printed(
    request_: PlanRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_report, "make_plan", lambda request, num_workers: planned(request))
    (tmp_path / "report").touch()
    said = StringIO()
    with pytest.raises(NotWritten):
        run_plan(
            request_, Output(report=tmp_path / "report", with_plots=False), Console(file=said, width=200)
        )
    assert "1 replica of 0.0102M tokens keeps p99" in said.getvalue()
