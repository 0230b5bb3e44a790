"""Ctrl-C in a benchmark: one line, status 130, and what was measured until then is shown as cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine, router
from benchmarks.cases import Cell
from benchmarks.kept import KeptCells
from benchmarks.router_report import Row as RouterRow
from benchmarks.rows import Row
from benchmarks.stopping import STOPPED, ctrl_c_is_ours, stoppable

ROOT = Path(__file__).resolve().parents[3]


class BenchThatIsStopped:
    """Measures one cell; in the second comes Ctrl-C."""

    def __init__(self, *_: Any) -> None:
        self._num_measured = 0

    def rows(self, cell: Cell) -> list[Row]:
        if self._num_measured:
            raise KeyboardInterrupt
        self._num_measured += 1
        return [Row("9M", "made", cell.name)]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Bench", BenchThatIsStopped)
    monkeypatch.setattr(engine, "_start", lambda *_: {})


@pytest.mark.usefixtures("stopped")
def test_the_engines_cells_until_then_are_told_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tables, kept = tmp_path / "out.json", tmp_path / "tables.md", tmp_path / "kept.jsonl"
    asked = ["--quick", "--json", str(out), "--markdown", str(tables), "--resume", str(kept)]
    assert engine.main(asked) == STOPPED == 130
    told = capsys.readouterr()
    assert told.err.startswith("bench-engine: interrupted with 1 of 8 cells measured, and ")
    assert told.err.endswith(f"{kept} keeps them: the same command goes on from there\n")
    assert "Cut short" in told.out
    assert "batch-1" in told.out
    found = json.loads(out.read_text())
    assert found["conditions"]["cut_short"] is True
    assert [row["label"] for row in found["rows"]] == ["batch-1"]
    assert tables.read_text().startswith("**Cut short")
    assert KeptCells(kept, {}).rows("9M", "batch-1") == [Row("9M", "made", "batch-1")]


@pytest.mark.usefixtures("stopped")
def test_before_the_engines_first_cell_there_is_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_start", interrupt)
    assert engine.main(["--quick"]) == STOPPED
    told = capsys.readouterr()
    assert told.out.strip() == ""
    assert told.err == "bench-engine: interrupted with 0 of 8 cells measured\n"


def test_the_routers_rows_until_then_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*_: Any) -> Iterator[RouterRow]:
        yield RouterRow("made", "one", amount=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(router.router_stall, "rows", rows)
    out = tmp_path / "out.json"
    asked = ["--quick", "--blocks", "6000", "--replicas", "2", "--parts", "stall", "--json", str(out)]
    assert router.main(asked) == STOPPED
    told = capsys.readouterr()
    assert told.err.strip() == "bench-router: interrupted with 1 row measured"
    assert "Cut short" in told.out
    assert json.loads(out.read_text())["conditions"]["cut_short"] is True


def test_what_keeps_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert stoppable(lambda: 7) == 7
    assert stoppable(interrupted) == STOPPED
    assert capsys.readouterr().err == "interrupted: nothing is kept\n"


@pytest.mark.parametrize("module", ["products", "several_answers"])
def test_while_a_benchmark_is_still_imported(module: str, tmp_path: Path) -> None:
    """It was a traceback for the seconds that importing torch takes."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (STOPPED, "", "interrupted: nothing is kept\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_started_does_not_get_it() -> None:
    """A terminal sends it to all of them, each with a traceback of its own."""
    with ctrl_c_is_ours():
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        fields = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        )
        assert int(fields["SigBlk"], 16) & 1 << signal.SIGINT - 1
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        process.communicate(b"\n")
