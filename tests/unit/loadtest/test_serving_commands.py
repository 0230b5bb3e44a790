"""What `compare`, `sweep` and `replay` say to what they cannot do: a line, a status, nothing started."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from deploy.router_variable import ROUTER_VARIABLE
from loadtest.__main__ import BAD_REQUEST, COMMANDS, _parser, main
from loadtest.commands import bench_fleet, serving
from loadtest.comparison.plan import Plan
from loadtest.comparison.progress import expected_s, in_words
from loadtest.placement.errors import BadRequest

TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was about to be started")

    monkeypatch.setattr(serving, "Deployment", refuse)
    monkeypatch.setattr(serving, "check", refuse)


def said(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str], status: int) -> str:
    try:
        found: object = main([*arguments, "--out", str(folder / "report"), "--no-plots"])
    except SystemExit as exit_:  # argparse's way
        found = exit_.code
    told = capsys.readouterr().err
    assert found == status, told
    assert "Traceback" not in told
    assert not (folder / "report").exists()
    return told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compare"], "name deploy.yaml files to compare, or --policy"),
        (["compare", "--policy", "fastest"], "unknown policy 'fastest'"),
        (["compare", "--policy", "ideal"], "can be simulated only"),
        (["compare", "--policy", "round_robin,round_robin"], "named twice"),
        (["compare", "--policy", "round_robin", "a.yaml", "b.yaml"], "changes one file"),
        (["compare", "--routers", "2,1", "a.yaml", "b.yaml"], "changes one file"),
        (["compare", "--routers", "2", "--policy", "round_robin"], "instead of each other"),
        (["compare", "--routers", "2,0"], "0 is below 1"),
        (["compare", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["compare", "--policy", "round_robin", "--rate", "0"], "0 is not above 0"),
        (["compare", "--policy", "round_robin", "--workload", "chess"], "unknown generator 'chess'"),
        (["sweep", "--policy", "round_robin"], "--ttft"),
        (["sweep", "--policy", "round_robin", "--ttft", "soon"], "'soon' is not a number"),
        (["replay", "--trace", "nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
        (["replay", "--start", "1e9"], "nobody arrives in the stretch asked for"),
        (["replay", "--duration", "30", "--warm", "60"], "--warm 60: the last request is due at"),
        (["bench-fleet", "--policy", "round_robin,round_robin"], "named twice"),
        (["compare", "--policy", "round_robin", "--max-context", "5"], "leaves no room for a prompt in 5"),
        (["sweep", "--policy", "round_robin", "--ttft", "1", "--max-context", "5"], "leaves no room"),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in said(arguments, tmp_path, capsys, BAD_REQUEST)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--policy", "expected_time,round_robin"],
        ["sweep", "--policy", "expected_time,round_robin", "--ttft", "1"],
        ["bench-fleet"],
    ],
    ids=lambda words: words[0],
)
def test_what_a_shell_would_lay_over_every_contender_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them ran the one policy that it names, under as many names as were asked for."""
    monkeypatch.setenv(ROUTER_VARIABLE, "policy: random")
    told = said(arguments, tmp_path, capsys, BAD_REQUEST)
    assert "WARMPATH_ROUTER is set in this shell" in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("hello\n", "mine.jsonl, line 1"),
        (TRACE, "all requests arrive at once"),
        (TRACE + TRACE, "all requests arrive at once"),
    ],
    ids=["malformed", "one-request", "no-duration"],
)
@pytest.mark.parametrize("command", [["compare"], ["sweep", "--ttft", "1"]], ids=lambda words: words[0])
def test_a_trace_without_a_window_costs_no_cluster(
    command: list[str], content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.jsonl").write_text(content)
    arguments = [*command, "--policy", "round_robin", "--trace", str(tmp_path / "mine.jsonl")]
    assert told in said(arguments, tmp_path, capsys, BAD_REQUEST)


@pytest.mark.parametrize("below", [".", "deeper/still"])
@pytest.mark.parametrize(
    "arguments",
    [["compare", "--policy", "round_robin"], ["replay", "--url", "http://127.0.0.1:1"]],
    ids=lambda words: words[0],
)
def test_a_report_that_cannot_be_written_is_told_before_anything_runs(
    arguments: list[str], below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    out = tmp_path / "taken" / below
    assert main([*arguments, "--out", str(out), "--no-plots"]) == BAD_REQUEST
    assert f"--out: nothing can be written to {out}" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text(TRACE)
    arguments = ["replay", "--trace", str(trace), "--url", "http://127.0.0.1:1"]
    assert "no OpenAI-compatible server answers at http://127.0.0.1:1" in said(arguments, tmp_path, capsys, 1)


def fleet_plan(*arguments: str) -> Plan:
    parser = argparse.ArgumentParser()
    bench_fleet.add_options(parser)
    return bench_fleet.fleet_plan(parser.parse_args(arguments))


def test_the_projects_own_comparison_is_what_its_documents_say() -> None:
    plan = fleet_plan()
    assert [contender.label for contender in plan.contenders] == list(bench_fleet.CONTENDERS)
    assert {contender.num_replicas for contender in plan.contenders} == {4}
    assert {contender.engine for contender in plan.contenders} == {"real engine, model tiny"}
    assert [cell.workload.source for cell in plan.cells] == [
        *("multi_turn", "multi_turn"),
        *("no_reuse", "hot_prefix", "decode_heavy"),
    ]
    assert (len(plan.searches), plan.repeats) == (1, 3)
    some = fleet_plan("--policy", "expected_time,ray_prefix_router")
    assert [contender.label for contender in some.contenders] == ["expected_time", "ray_prefix_router"]
    quick = fleet_plan("--quick")
    assert (len(quick.cells), quick.searches, quick.repeats) == (2, (), 1)
    assert fleet_plan("--quick", "--repeats", "2").repeats == 2
    with pytest.raises(BadRequest, match="named twice"):
        fleet_plan("--policy", "round_robin,round_robin")


def test_a_search_is_told_by_the_tries_it_takes() -> None:
    """Two policies took 63 minutes: six rates about half as high as the first, half of them tried twice."""
    plan = fleet_plan("--part", "search", "--policy", "expected_time,round_robin", "--repeats", "1")
    assert expected_s(plan) == 2 * (25 + 9 * 200)


def test_how_long_it_takes_is_never_no_minutes() -> None:
    """It said about 0 minutes, and 1 minutes."""
    assert [in_words(seconds) for seconds in (29.6, 89.0, 90.0, 3600.0)] == [
        "30 seconds",
        "89 seconds",
        "2 minutes",
        "60 minutes",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_examples_that_are_understood(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(TRACE)
    lines = [line.strip() for line in COMMANDS[name].DESCRIPTION.splitlines()]
    examples = [line for line in lines if line.startswith("python -m loadtest ")]
    assert examples
    for example in examples:
        _parser().parse_args(shlex.split(example)[3:])
