"""What a run that was cut off leaves is what the next one begins with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.kept import KeptCells, OtherConditions
from benchmarks.pairs import Ratio
from benchmarks.rows import Row, Verdict
from benchmarks.spans import Span
from loadtest.placement.intervals import Interval

CONDITIONS = {"machine": "here", "pairs": {"most": 3}}
ROWS = [
    Row(
        "9M",
        "whole requests, s",
        "1 x 257 in, 64 out",
        {"warmpath": Span(1.0, 0.9)},
        ratios={
            "generate": Ratio(Interval(1.2, 1.1, 1.3), Interval(1.1, 1.0, 1.2), 3),
            "continuous": Ratio(Interval(2.0, 0.0, math.inf), Interval(2.0, 0.0, math.inf), 1),
        },
        verdicts=(Verdict("miss / generate", ">= 0.95x", "1.20x", True),),
        note="warmpath differs in 1/2",
    ),
    Row("9M", "tokens/s", "batch 1: peak MiB", amounts={"warmpath": 3.0}),
]


def test_cells_come_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    KeptCells(path, CONDITIONS).keep("9M", "whole-1x257", ROWS)
    again = KeptCells(path, CONDITIONS)
    assert again.rows("9M", "whole-1x257") == ROWS
    assert again.rows("132M", "whole-1x257") is None


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    kept = KeptCells(path, CONDITIONS)
    kept.keep("9M", "batch-1", ROWS[:1])
    kept.keep("9M", "batch-8", ROWS)
    path.write_text(path.read_text()[:-20])
    again = KeptCells(path, CONDITIONS)
    assert again.rows("9M", "batch-8") is None
    again.keep("9M", "batch-8", ROWS)
    last = KeptCells(path, CONDITIONS)
    assert (last.rows("9M", "batch-1"), last.rows("9M", "batch-8")) == (ROWS[:1], ROWS)


def test_other_conditions_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    KeptCells(path, CONDITIONS)
    with pytest.raises(OtherConditions, match=r"begun with another machine$") as raised:
        KeptCells(path, {**CONDITIONS, "machine": "there"})
    assert raised.value.differing == ("machine",)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="not a file that --resume has made"):
        KeptCells(path, CONDITIONS)
    assert path.read_text() == "hello\n"


def test_without_a_file_this_run_still_knows_its_cells() -> None:
    kept = KeptCells(None, CONDITIONS)
    kept.keep("9M", "batch-1", ROWS)
    assert kept.rows("9M", "batch-1") == ROWS
