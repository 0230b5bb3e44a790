"""What every command says to what it cannot do: one line that names it, status 2, no table, no cell run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from loadtest.__main__ import BAD_REQUEST, main
from loadtest.__main__ import COMMANDS as EVERY
from loadtest.placement.errors import BadRequest
from loadtest.placement.policy_choice import PolicyChoice
from loadtest.placement.suites import GridSpec
from loadtest.simulation.cell import IDEALS, Failure, Scaling
from loadtest.simulation.errors import FleetFailed
from loadtest.simulation.several_routers import Result, Turn
from loadtest.simulation.validate import Comparison
from loadtest.workloads.generators import GENERATORS
from loadtest.workloads.reference import WorkloadRef
from router.policies import POLICIES

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
TRACES: Mapping[str, str] = {
    "no-answer": GOOD + GOOD.replace('"output_length": 5', '"output_length": 0'),
    "not-json": GOOD + "hello\n",
    "unknown-field": GOOD.replace("}", ', "colour": 1}'),
    "empty": "",
    "one-request": GOOD,
}
TOLD: Mapping[str, tuple[str, ...]] = {
    "no-answer": ("no-answer.jsonl, line 2", "'output_length'"),
    "not-json": ("not-json.jsonl, line 2", "JSON"),
    "unknown-field": ("unknown-field.jsonl, line 1", "'colour'", "input_length"),
    "empty": ("empty.jsonl", "no requests"),
    "one-request": ("one",),
}
COMMANDS = (
    ("simulate",),
    ("tune", "--policy", "expected_time"),
    ("plan", "--ttft-p99", "1"),
    ("bench-placement",),
)


def said(arguments: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What it says on standard error to something it refuses."""
    own = ("--out", str(folder / "report"), "--no-plots")
    if arguments[0] != "plan":
        own += ("--results", str(folder / "cells"))
    try:
        status: object = main([*arguments, *own])
    except SystemExit as exit_:  # argparse's way
        status = exit_.code
    told = capsys.readouterr()
    assert status == BAD_REQUEST
    assert "over the ideal" not in told.out
    assert not (folder / "report").exists()
    assert not (folder / "cells").exists()
    assert "Traceback" not in told.err
    return told.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("trace", TRACES)
def test_a_trace_that_cannot_be_used_is_named_by_line_and_field(
    command: tuple[str, ...], trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{trace}.jsonl"
    path.write_text(TRACES[trace])
    told = said((*command, "--trace", str(path)), tmp_path, capsys)
    assert all(part in told for part in TOLD[trace])


@pytest.mark.parametrize(
    "command", [COMMANDS[0], COMMANDS[1][:1], COMMANDS[2]], ids=lambda command: command[0]
)
def test_an_unknown_policy_lists_those_there_are(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said((*command, "--policy", "fastest"), tmp_path, capsys)
    assert "'fastest'" in told
    assert all(name in told for name in POLICIES)


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2]], ids=lambda command: command[0])
def test_an_unknown_knob_lists_those_there_are(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said((*command, "--policy", "expected_time:colour=1"), tmp_path, capsys)
    assert "'colour'" in told
    assert "near_tie" in told
    assert "hold_window" in told


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("simulate", "--policy", "expected_time:near_tie=7"), ("near_tie", "between 0.0 and 1.0")),
        (("simulate", "--machine", "scheduling_order=1"), ("'scheduling_order'", "NAME+shortest", "base_s")),
        (("simulate", "--workload", "surfing"), ("'surfing'", *GENERATORS)),
        (("simulate", "--workload", "multi_turn:colour=1"), ("'colour'", "think_s")),
        (("simulate", "--workload", "multi_turn", "--spread-ticks"), ("--spread-ticks",)),
        (("simulate", "--requests", "1"), ("1 is below 2",)),
        (("simulate", "--routers", "0"), ("--routers", "below 1")),
        (("simulate", "--routers", "2,2"), ("--routers", "twice")),
        (("simulate", "--replicas", "4,16", "--fail", "60:4"), ("replica 4", "fleet of 4")),
        (
            ("simulate", "--replicas", "2", "--fail", "5:3", "--scale", "100:4"),
            ("replica 3", "at 5 s", "fleet of 2"),
        ),
        (
            ("simulate", "--replicas", "4", "--scale", "50:2", "--fail", "60:3"),
            ("replica 3", "at 60 s", "fleet of 2"),
        ),
        (("simulate", "--fail", "60"), ("SECOND:REPLICA",)),
        (("simulate", "--scale", "60:0"), ("--scale", "below 1")),
        (("simulate", "--replicas", "2", "--slow", "1,1,2"), ("3 slow replicas", "fleet of 2")),
        (("plan", "--ttft-p99", "0"), ("--ttft-p99", "not above 0")),
        (("plan", "--ttft-p99", "1", "--policy", "all"), ("one policy", "'all'")),
        (("plan", "--ttft-p99", "1", "--requests", "1"), ("1 is below 2",)),
        *(
            (
                ("plan", "--ttft-p99", "1", "--policy", ideal),
                ("--policy", f"'{ideal}'", "deployed", *POLICIES),
            )
            for ideal in IDEALS
        ),
        (
            ("plan", "--ttft-p99", "1", "--requests", "20", "--cache-tokens", "1k"),
            ("cache_tokens = 1000", "the largest request takes"),
        ),
        (
            ("plan", "--ttft-p99", "1", "--requests", "20", "--machine", "max_model_len=100"),
            ("machine.max_model_len = 100: the longest prompt has",),
        ),
        (("tune", "--policy", "expected_time:near_tie=0.1"), ("'expected_time:near_tie=0.1'",)),
        (("tune", "--policy", "ideal"), ("'ideal'",)),
        (("bench-placement", "--part", "best"), ("'best'", "conversation")),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_named(
    arguments: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said(arguments, tmp_path, capsys)
    assert all(part in told for part in parts), told


def test_a_file_of_policies_that_is_no_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policies.txt"
    path.write_bytes(b"expected_time\n\xff\xfe\n")
    assert f"{path}: not UTF-8" in said(("simulate", "--policy", f"@{path}"), tmp_path, capsys)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command in COMMANDS
        for option in ("--out", "--results")
        if (command[0], option) != ("plan", "--results")  # runs no cells
    ],
    ids=lambda part: part[0] if isinstance(part, tuple) else part,
)
@pytest.mark.parametrize("folder", ["a-file", "a-file/below", "/proc/nowhere", "dangling"])
def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(
    command: tuple[str, ...],
    option: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was a traceback after the last cell, an hour later for some."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "not" / "there")
    before = sorted(tmp_path.iterdir())
    assert main([*command, "--no-plots", option, folder]) == BAD_REQUEST
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"loadtest: {option}: ")
    assert folder in told.err
    assert sorted(tmp_path.iterdir()) == before


def test_plan_keeps_no_cells_and_says_which_files_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """It took --results, and used it for nothing; a report.md was promised."""
    with pytest.raises(SystemExit):
        main(["plan", "--ttft-p99", "1", "--results", "cells"])
    assert "unrecognized arguments: --results" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = capsys.readouterr().out
    assert "plan.json and hit-rate.png" in told
    assert "report.md" not in told


def test_a_part_whose_folder_is_a_file_is_told_before_the_parts_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tuned").touch()
    parts = ("--part", "conversation", "--part", "tuned")
    assert main(["bench-placement", *parts, "--no-plots", "--out", "out"]) == BAD_REQUEST
    told = capsys.readouterr()
    assert (told.out, "out/tuned" in told.err) == ("", True)


def test_a_plan_for_requests_that_come_at_one_instant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the busiest few of a trace with ticks do: they have no rate, and need replicas all the same."""
    trace = tmp_path / "burst.jsonl"
    trace.write_text(3 * GOOD)
    own = ("--out", str(tmp_path / "report"), "--no-plots")
    assert main(["plan", "--trace", str(trace), "--ttft-p99", "5", "--cache-tokens", "10k", *own]) == 0
    told = capsys.readouterr().out
    assert "the 3 requests in a row" in told
    assert "all at one instant" in told


@pytest.mark.parametrize(
    ("at_s", "replica", "can_die"),
    [(60.0, 5, True), (60.0, 6, False), (50.0, 5, False), (50.0, 3, True), (71.0, 2, False), (71.0, 1, True)],
)
def test_a_replica_may_die_while_it_is_there(at_s: float, replica: int, can_die: bool) -> None:
    """Four replicas, six from second 50 on, two after 70: who is not there at that second was no failure."""
    with nullcontext() if can_die else pytest.raises(BadRequest, match=f"replica {replica}"):
        GridSpec(
            (WorkloadRef("no_reuse"),),
            (PolicyChoice("round_robin"),),
            replicas=(4,),
            failures=(Failure(at_s, replica),),
            scalings=(Scaling(70.0, 5), Scaling(50.0, 6), Scaling(70.0, 2)),
        )


def test_replicas_that_fail_are_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(console: object) -> bool:
        raise FleetFailed("replica r2 has died")

    monkeypatch.setattr("loadtest.simulation.validate.validate", fail)
    assert main(["simulate", "--validate"]) == 1
    assert capsys.readouterr().err == "loadtest: replica r2 has died\n"


@pytest.mark.parametrize(
    "option",
    [
        ("--policy", "nope"),
        ("--policy", "round_robin"),
        ("--replicas", "8"),
        ("--workload", "no_reuse"),
        ("--machine", "base_s=0.01"),
        ("--no-kv-events",),
        ("--out", "elsewhere"),
    ],
    ids=" ".join,
)
def test_validation_refuses_what_it_does_not_use(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compares its own policies on its own workload: others were taken, and not looked at."""

    def fail(console: object) -> bool:
        raise AssertionError("it has started replicas")

    monkeypatch.setattr("loadtest.simulation.validate.validate", fail)
    assert main(["simulate", "--validate", *option]) == BAD_REQUEST
    assert f"--validate takes no other option, and not {option[0]}" in capsys.readouterr().err


BUSY = "loadtest: the machine was too busy to tell: 31 % of step time was waiting for a core\n"


def test_a_busy_machine_says_nothing_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Far apart, in another order: it was told that the simulator is not within its tolerance."""
    none = np.zeros(3, dtype=np.int64)
    fast, slow = np.array([1.0, 1.1, 1.2]), np.array([3.0, 3.2, 3.4])

    async def compared(console: object) -> list[Comparison]:
        return [
            Comparison("a", fast, slow, none, none, 1, stolen=0.02, busy=0.5),
            Comparison("b", slow, fast, none, none, 1, stolen=0.31, busy=0.5),
        ]

    monkeypatch.setattr("loadtest.simulation.validate.compare", compared)
    assert main(["simulate", "--validate"]) == 1
    told = capsys.readouterr()
    assert told.err == BUSY
    assert "hold" not in told.out
    assert "Order" not in told.out


def test_a_busy_machine_says_nothing_of_two_routers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(*_: object, **__: object) -> Result:
        return Result(((Turn(1, 1.0, 0.5, 0.02), Turn(2, 2.0, 0.5, 0.31)),))

    monkeypatch.setattr("loadtest.simulation.several_routers.measure", measured)
    assert main(["bench-routers"]) == 1
    told = capsys.readouterr()
    assert told.err == BUSY
    assert "within" not in told.out


@pytest.mark.parametrize(("asked", "run"), [("2,4", (1, 2, 4)), ("4,1", (4, 1)), ("1", (1,))])
def test_one_router_is_always_among_several(
    asked: str, run: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several are compared with: without it that table had nothing but names."""
    found: list[GridSpec] = []
    monkeypatch.setattr(
        "loadtest.commands.simulate.run_experiment", lambda spec, output, console: found.append(spec)
    )
    own = ("--out", str(tmp_path / "report"), "--results", str(tmp_path / "cells"))
    assert main(["simulate", "--routers", asked, *own]) == 0
    assert found[0].routers == run


def test_the_help_of_all_says_of_every_command_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """bench-fleet and bench-routers were among "the others", which need no server."""
    with pytest.raises(SystemExit):
        main(["--help"])
    needs = capsys.readouterr().out.partition("\n\n")[2].partition("positional arguments")[0]
    assert all(re.search(rf"(?<![\w-]){command}(?![\w-])", needs) for command in EVERY), needs


@pytest.mark.parametrize("command", EVERY)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A lone % in an option's text is a format of argparse's, found only when the text is asked for."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"python -m loadtest {command}" in capsys.readouterr().out
