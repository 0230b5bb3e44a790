"""A run that was cut off goes on: whole cells are kept, the one it ended in is asked again."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any

import msgspec
import pytest

from benchmarks.overhead import __main__ as command
from benchmarks.overhead.cells import Cell, Path, Plan, Prompt, cells_of
from benchmarks.overhead.modes import Mode
from benchmarks.overhead.records import OtherConditions, Records
from benchmarks.overhead.samples import Idle, Part, Run, Sample, Tokenizing

PLAN = Plan(cells_of((Prompt.SMALL,), (1, 8)), repeats=2, requests=1, streams=1, idle_s=0.0)
HERE = {"machine": "this one", "step_ms": 5.0}
CPU = dict.fromkeys(Part, 0.25)


def told(thing: Any) -> Any:
    """As a session's line holds it."""
    return json.loads(msgspec.json.encode(thing))


def run(cell: Cell, path: Path, mode: Mode = Mode.FAST) -> Run:
    return Run(mode, cell, path, (Sample(0.01, 15),), 1.0, CPU)


def ask(records: Records, cell: Cell, *, repeats: int = 2, mode: Mode = Mode.FAST) -> None:
    for _ in range(repeats):
        for path in Path:
            records.add("run", told(run(cell, path, mode)))


@pytest.fixture
def file(tmp_path: FilePath) -> FilePath:
    return tmp_path / "run.jsonl"


def test_what_was_told_is_there_again(file: FilePath) -> None:
    first = Records.open(file, HERE, PLAN)
    ask(first, PLAN.cells[0])
    first.add("idle", told(Idle(Mode.FAST, CPU)))
    first.add("tokenizing", told(Tokenizing("8k", 0.001)))
    first.close()
    again = Records.open(file, HERE, PLAN)
    assert (again.runs, again.idle, again.tokenizing) == (first.runs, first.idle, first.tokenizing)
    assert again.runs[0] == run(PLAN.cells[0], Path.DIRECT)
    again.close()
    again.close()


def test_a_cell_that_was_cut_off_is_asked_again_in_whole(file: FilePath) -> None:
    done, cut_off, *others = PLAN.cells
    first = Records.open(file, HERE, PLAN)
    ask(first, done)
    ask(first, cut_off, repeats=1)
    first.close()
    again = Records.open(file, HERE, PLAN)
    assert again.left(Mode.FAST, PLAN) == (cut_off, *others)
    assert again.left(Mode.DEFAULT, PLAN) == PLAN.cells
    assert {seen.cell for seen in again.runs} == {done}
    for cell in again.left(Mode.FAST, PLAN):
        ask(again, cell)
    again.close()
    whole = Records.open(file, HERE, PLAN)
    assert whole.left(Mode.FAST, PLAN) == ()
    whole.close()


def test_a_line_cut_in_the_middle_is_not_taken_for_one(file: FilePath) -> None:
    first = Records.open(file, HERE, PLAN)
    ask(first, PLAN.cells[0])
    first.close()
    file.write_text(file.read_text()[:-30])
    again = Records.open(file, HERE, PLAN)
    assert again.left(Mode.FAST, PLAN) == PLAN.cells
    ask(again, PLAN.cells[0])
    again.close()
    whole = Records.open(file, HERE, PLAN)
    assert whole.left(Mode.FAST, PLAN) == PLAN.cells[1:]
    whole.close()


def test_other_conditions_are_named(file: FilePath) -> None:
    Records.open(file, HERE, PLAN).close()
    with pytest.raises(OtherConditions, match="another step_ms"):
        Records.open(file, {**HERE, "step_ms": 6.0}, PLAN)


def test_a_file_of_something_else_is_left_alone(file: FilePath) -> None:
    file.write_text('["run", {}]\n')
    with pytest.raises(ValueError, match="no file of this benchmark"):
        Records.open(file, HERE, PLAN)
    assert file.read_text() == '["run", {}]\n'


def test_without_a_file_nothing_is_written(tmp_path: FilePath) -> None:
    records = Records.open(None, HERE, PLAN)
    ask(records, PLAN.cells[0])
    records.close()
    assert records.left(Mode.FAST, PLAN) == PLAN.cells[1:]
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_is_a_bug() -> None:
    with pytest.raises(KeyError, match="doing"):
        Records.open(None, HERE, PLAN).add("doing", "something")


def test_a_quick_run_is_not_gone_on_with_as_a_whole_one(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight requests in a run are not sixty: the cells would be taken for finished."""
    monkeypatch.setattr(command, "_told_by", lambda order: iter(()))
    kept = ("--modes", "default", "--resume", str(tmp_path / "kept"), "--repeats", "1")
    assert command.main([*kept, "--quick"]) == 0
    assert command.main(kept) == 2
    assert "another requests, streams" in capsys.readouterr().err
