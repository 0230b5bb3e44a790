"""`make conformance` for some rows: which are asked, and what is said where there is no such row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.__main__ import Collector, main, rows_named
from tests.conformance.rows import ROWS

PROJECT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in pytest would share its state: a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.conformance", *arguments],
        cwd=PROJECT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ([], list(ROWS)),
        (["504 deadline"], ["504 deadline"]),
        (["stop"], ["stop"]),  # not stop_token_ids
        (["PENALTY"], ["repetition_penalty", "presence_penalty", "frequency_penalty"]),
        (["seed", "top_p", "top_k"], ["top_p", "seed", "top_k"]),
    ],
)
def test_rows_are_named_by_their_names_or_a_part_of_them(words: list[str], rows: list[str]) -> None:
    assert rows_named(words) == rows


def test_a_word_that_no_row_matches_is_told_with_the_rows_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["deadline", "quantum"])
    assert ended.value.code == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert "error: no row matches 'quantum'; there are: POST /v1/completions; " in told
    assert all(row in told for row in ROWS)


@pytest.mark.long
def test_pytest_choosing_no_test_is_told_likewise() -> None:
    done = run("-k", "quantum")
    assert done.returncode == 2, done.stdout
    assert "error: no row matches '-k quantum'; there are: " in done.stderr.splitlines()[-1]
    assert "NO TEST" not in done.stdout


def test_the_others_are_neither_run_nor_missed() -> None:
    """Those of other rows, and those that pytest's own options leave out."""
    done = run("504", "429", "-k", "deadline")
    assert done.returncode == 0, done.stdout
    rows = [line.split("\u2502")[1].strip() for line in done.stdout.splitlines() if line.startswith("\u2502")]
    assert rows == ["504 deadline"]


def test_a_row_without_a_test_is_broken() -> None:
    tallies = Collector(["stop"]).tallies
    assert tallies["stop"].verdict == "NO TEST"
    assert tallies["stop"].is_broken
