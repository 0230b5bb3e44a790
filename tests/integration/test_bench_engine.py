"""The engine benchmark end to end: three real contenders, on a network small enough for a test."""

from __future__ import annotations

import io
import json
import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import cases, engine, models, step_profile
from benchmarks.cases import FirstToken, ModelSpec, Overhead, Pairs, Plan, Throughput, Whole
from benchmarks.kept import KeptCells
from benchmarks.step_profile import PARTS, SHAPES, profile
from benchmarks.worker import Worker, WorkerFailed

MICRO = ModelSpec("micro", 64, 128, 2, 4, 2, 16, 500)


def _micro_plan(models: tuple[ModelSpec, ...], pairs: Pairs) -> Plan:
    return Plan(
        models=(MICRO,),
        throughput=(Throughput(4, 40, 10),),
        first_token=(FirstToken(200),),
        whole=(Whole(2, 70, 6),),
        overhead=(Overhead(2, 40, 6, 1),),
        pairs=pairs,
        num_blocks=160,
    )


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files go where the test can see that they are gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.long
def test_a_quick_run_measures_everything_and_leaves_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "quick_plan", _micro_plan)
    out = folders / "out.json"
    tables, kept = folders / "tables.md", folders / "kept.jsonl"
    command = ["--quick", "--pairs", "1", "--chunk", "64", "--json", str(out), "--resume", str(kept)]
    assert engine.main([*command, "--markdown", str(tables)]) == 0
    rows = {(row["section"], row["label"]): row for row in json.loads(out.read_text())["rows"]}
    labels = [label for _, label in rows]
    assert labels == [
        "batch 4: prefill",
        "batch 4: prefill, decodes beside",
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
    assert tables.read_text().count("**micro, ") == 4

    def starts_nobody(*_: object, **__: object) -> None:
        raise AssertionError("everything is kept")

    monkeypatch.setattr(engine, "_start", starts_nobody)
    first = out.read_text()
    assert engine.main(command) == 0
    assert json.loads(out.read_text())["rows"] == json.loads(first)["rows"]
    assert engine.main([*command, "--chunk", "32"]) == 2
    assert "begun with another max_batched_tokens" in capsys.readouterr().err


def test_a_contender_that_cannot_load_ends_the_run_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ModelSpec("broken", 64, 128, 2, 4, 2, 16, vocabulary=0)
    plan = Plan(models=(broken,), whole=(Whole(2, 70, 6),))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(WorkerFailed, match="warmpath failed:\nTraceback"):
        engine.measure(plan, KeptCells(None, {}), threads=1, chunk=64, console=Console(file=io.StringIO()))
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


def test_every_part_of_a_real_step_is_found(tmp_path: Path) -> None:
    """On a network small enough for a test; what is watched is left as it was."""
    from replica.scheduling.scheduler import Scheduler

    own = Scheduler.__dict__["schedule"]
    folder = models.build(MICRO, tmp_path)
    shape = replace(SHAPES[1], batch=2, prompt_tokens=20, output_tokens=6)
    [found] = profile(MICRO, [shape], folder, repeats=1)
    assert Scheduler.__dict__["schedule"] is own
    assert found.num_steps == 5
    missing = {part for part in PARTS if not found.parts[part]}
    assert missing <= {step_profile.OUTPUT}, "a head so small is not screened: then it is a linear layer"
    assert found.unwatched_s > 0


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engine.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--quick", "--models", "--only", "--pairs", "--resume", "--json", "CPU time", "examples:"):
        assert word in text


@pytest.mark.parametrize(
    "arguments", [["--pairs", "0"], ["--only", "batch-7"], ["--models", "7B"], ["--threads", "-1"]]
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = engine.main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert arguments[1] in capsys.readouterr().err
