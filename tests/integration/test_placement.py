"""A slice of `make bench-placement`, from the command line to the report, on the licensed excerpt.

Laws that any grid must keep: prefix-aware placement beats turns on a trace that shares, no policy that
dispatches at once beats the ideal by more than luck, and a grid taken up again says what a fresh one says.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.placement.intervals import geometric_mean
from loadtest.placement.suites import EXCERPT

POLICIES = ("expected_time", "expected_time+late", "power_of_two", "round_robin")
SLICE = (
    *("--trace", str(EXCERPT), "--requests", "500", "--workers", "2"),
    *("--replicas", "4,16", "--load", "0.6,0.85", "--seed", "0,1"),
    *(part for policy in POLICIES for part in ("--policy", policy)),
)
Cells = dict[str, dict[tuple[int, float, int], dict[str, Any]]]  # by policy, then replicas, load and seed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def simulate(folder: Path, *arguments: str) -> int:
    return main(["simulate", "--results", str(folder / "cells"), "--out", str(folder / "report"), *arguments])


def read_cells(folder: Path) -> Cells:
    found: Cells = defaultdict(dict)
    for cell in json.loads((folder / "report" / "results.json").read_text())["cells"]:
        found[cell.pop("policy")][cell["num_replicas"], cell["load"], cell["seed"]] = cell
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The slice, in two runs: the second takes up what the first left."""
    folder = tmp_path_factory.mktemp("resumed")
    assert simulate(folder, *SLICE, "--no-plots", "--replicas", "4", "--seed", "1") == 0
    assert simulate(folder, *SLICE) == 0
    return folder


def over(cells: Cells, ours: str, theirs: str, measure: str = "mean_ttft_s") -> float:
    pairs = [(cells[ours][place][measure], cells[theirs][place][measure]) for place in cells[theirs]]
    return geometric_mean([a / b for a, b in pairs])


def test_every_cell_is_there_and_paired(resumed: Path) -> None:
    cells = read_cells(resumed)
    assert set(cells) == {"ideal", *POLICIES}
    assert all(len(of_policy) == 2 * 2 * 2 for of_policy in cells.values())


def test_prefix_aware_placement_beats_turns(resumed: Path) -> None:
    cells = read_cells(resumed)
    assert over(cells, "expected_time", "round_robin") < 0.9
    assert over(cells, "expected_time", "power_of_two") < 0.9
    assert over(cells, "expected_time", "round_robin", "hit_ratio") > 1.2


def test_the_ideal_is_beaten_by_none_that_dispatches_at_once(resumed: Path) -> None:
    """By more than luck: greedy choices are not always the best ones."""
    cells = read_cells(resumed)
    for policy in ("expected_time", "power_of_two", "round_robin"):
        assert over(cells, policy, "ideal") > 0.97
        assert over(cells, policy, "ideal", "hit_ratio") < 1.01


def test_taken_up_again_says_what_a_fresh_run_says(resumed: Path, tmp_path: Path) -> None:
    arguments = ("--replicas", "4", "--load", "0.85", "--seed", "0,1", "--no-plots")
    assert simulate(tmp_path, *SLICE, *arguments) == 0
    fresh, kept = read_cells(tmp_path), read_cells(resumed)
    for policy, cells in fresh.items():
        assert len(cells) == 2
        for place, cell in cells.items():
            assert kept[policy][place] == cell, (policy, place)


def test_the_report_is_complete(resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(resumed, *SLICE) == 0
    shown = capsys.readouterr()
    assert "40 of 40 cells finished already" in shown.out
    assert "Machine: step = " in shown.out
    assert "expected_time beside each rival" in shown.out
    report = resumed / "report"
    assert {path.suffix for path in report.iterdir()} == {".md", ".json", ".png"}
    assert "| policy | 4@0.6 | 4@0.85 | 16@0.6 | 16@0.85 |" in (report / "report.md").read_text()


def write_bad_trace(folder: Path) -> tuple[str, ...]:
    path = folder / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": "x", "hash_ids": [1]}\n')
    return ("--trace", str(path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (lambda _: ("--policy", "nonsense"), ["unknown policy 'nonsense'", "round_robin", "expected_time"]),
        (lambda _: ("--policy", "expected_time:nonsense=1"), ["no knob 'nonsense'", "near_tie"]),
        (write_bad_trace, ["bad.jsonl", "line 1", "'output_length'"]),
    ],
)
def test_bad_input_is_named_and_no_table_is_made(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: Callable[[Path], tuple[str, ...]],
    told: list[str],
) -> None:
    assert simulate(tmp_path, *arguments(tmp_path), "--requests", "50", "--replicas", "2", "--seed", "0") != 0
    shown = capsys.readouterr()
    for part in told:
        assert part in shown.err
    assert "over the ideal" not in shown.out
    assert not (tmp_path / "report").exists()


def test_how_many_were_refused_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"format": "warmpath-trace", "version": 2}]
    for number in range(60):
        came_of_it: dict[str, Any] = {"refused": True} if number % 3 else {"output": 4}
        rows.append({"t": number / 9, "input": 9, **came_of_it, "blocks": [], "block_size": 16})
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    told = "40 of 60 were refused when they were recorded"
    arguments = ["plan", "--trace", str(path), "--ttft-p99", "10", "--cache-tokens", "400k", "--no-plots"]
    assert main([*arguments, "--out", str(tmp_path), "--workers", "1"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    only = ("--requests", "50", "--replicas", "2", "--load", "0.6", "--seed", "0", "--workers", "1")
    assert simulate(tmp_path, "--trace", str(path), *only, "--policy", "round_robin", "--no-plots") == 0
    assert told in capsys.readouterr().out


def test_a_plan_for_a_promise_and_for_one_that_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--trace", str(EXCERPT), "--requests", "150", "--cache-tokens", "400k,1.5M"]
    arguments += ["--out", str(tmp_path), "--workers", "2"]
    assert main([*arguments, "--ttft-p99", "12"]) == 0
    assert "replicas of" in capsys.readouterr().out
    assert (tmp_path / "hit-rate.png").exists()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(plan["fleets"]) == 2
    hits = plan["hit_rate"][1]
    assert hits == sorted(hits)
    assert hits[-1] > 0.15
    assert main([*arguments, "--ttft-p99", "0.001", "--max-replicas", "8", "--no-plots"]) == 1
    assert "not even 8 replicas" in capsys.readouterr().err
