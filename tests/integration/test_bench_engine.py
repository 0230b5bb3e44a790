"""The engine benchmark end to end: three real contenders, on a network small enough for a test."""

from __future__ import annotations

import io
import json
import multiprocessing
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import cases, engine
from benchmarks.cases import FirstToken, ModelSpec, Overhead, Plan, Throughput, Whole
from benchmarks.worker import Worker, WorkerFailed

MICRO = ModelSpec("micro", 64, 128, 2, 4, 2, 16, 500)


def _micro_plan(models: tuple[ModelSpec, ...], repeats: int) -> Plan:
    return Plan(
        models=(MICRO,),
        throughput=(Throughput(4, 40, 10, repeats, repeats),),
        first_token=(FirstToken(200, repeats),),
        whole=(Whole(2, 70, 6, repeats),),
        overhead=(Overhead(2, 40, 6, repeats),),
        num_blocks=160,
    )


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files go where the test can see that they are gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_quick_run_measures_everything_and_leaves_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "quick_plan", _micro_plan)
    out = folders / "out.json"
    assert engine.main(["--quick", "--repeats", "1", "--chunk", "64", "--json", str(out)]) == 0
    rows = {(row["section"], row["label"]): row for row in json.loads(out.read_text())["rows"]}
    labels = [label for _, label in rows]
    assert labels == [
        "batch 4: prefill",
        "batch 4: steady decode",
        "batch 4: peak MiB",
        "200:  0 % hit",
        "200: 50 % hit (96)",
        "200: 90 % hit (176)",
        "2 x 70 in, 6 out",
        "on",
        "off",
    ]
    for row in rows.values():
        assert all(value["cpu_s"] > 0 and value["wall_s"] > 0 for value in row["values"].values())
        assert "differs" not in row["note"], "somebody answered otherwise than generate"
    decode = next(row for (_, label), row in rows.items() if label == "batch 4: steady decode")
    assert set(decode["values"]) == {"warmpath", "generate", "continuous"}
    printed = capsys.readouterr().out
    assert "micro" in printed
    assert "torch" in printed
    assert multiprocessing.active_children() == []
    assert [path.name for path in folders.iterdir() if path.name.startswith("warmpath-bench")] == []


def test_a_contender_that_cannot_load_ends_the_run_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ModelSpec("broken", 64, 128, 2, 4, 2, 16, vocabulary=0)
    plan = Plan(models=(broken,))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(WorkerFailed, match="warmpath failed:\nTraceback"):
        engine.measure(plan, threads=1, chunk=64, console=Console(file=io.StringIO()))
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    worker = Worker("nobody", MICRO, tmp_path, threads=1, num_blocks=16, chunk=16)
    try:
        worker._process.kill()
        worker.load()
        with pytest.raises(WorkerFailed, match="nobody died, exit status -9"):
            worker.wait_until_ready()
    finally:
        worker.close()
        worker.close()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engine.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--quick", "--models", "--repeats", "--json", "CPU time", "examples:"):
        assert word in text


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--models", "7B"], ["--threads", "-1"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engine.main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
