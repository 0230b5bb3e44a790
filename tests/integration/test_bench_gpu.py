"""The GPU benchmark end to end on a CPU: all of it runs before a card is there, on a small network."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig

from benchmarks.contender import CONTINUOUS, GENERATE
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, contenders
from benchmarks.gpu.plan import GATHER, TINY
from benchmarks.gpu.sheet import OtherConditions, Result, Sheet
from benchmarks.transformers_engines import batching_options
from replica.attention import kv_pages
from replica.runners.model_runner import ModelRunner

ON_CPU = ["--device", "cpu", "--tiny", "--dtype", "float32"]
OURS_AND_GENERATE = ["--contenders", GATHER, GENERATE]


def run(out: Path, *arguments: str) -> int:
    return command.main([*ON_CPU, "--out", str(out), *arguments])


def results(out: Path) -> dict[tuple[str, str, str], Any]:
    document = json.loads(out.read_text())
    return {(each["section"], each["case"], each["contender"]): each for each in document["results"]}


def test_it_measures_everything_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bench.json"
    assert run(out, "--limit-s", "0", *OURS_AND_GENERATE) == 1
    assert "results are not there yet" in capsys.readouterr().out
    assert len(results(out)) == 1, "the card's limits, and nothing begun after the time was up"

    status, told, found = run(out, *OURS_AND_GENERATE), capsys.readouterr().out, results(out)
    assert status == 0, told
    assert len(found) == 18
    assert not any(each["note"] for each in found.values())
    assert found["greedy tokens", "4", GATHER]["outputs"] == found["greedy tokens", "4", GENERATE]["outputs"]
    assert found["first token", "90% cached", GATHER]["values"] == {"cached_tokens": 176}
    assert "100% / 100%" in told
    assert "reached  gather_sdpa  attention error, long decode" in told

    def never(*_: object) -> None:
        raise AssertionError("it measured again what it had")

    monkeypatch.setattr(contenders, "running", never)
    assert run(out, *OURS_AND_GENERATE) == 0
    assert results(out) == found


def test_results_of_contenders_that_are_not_named_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    assert run(out, *OURS_AND_GENERATE) == 0
    capsys.readouterr()
    assert run(out, "--contenders", GENERATE) == 0
    assert f"6 results, 6 of them in {out}" in capsys.readouterr().out


def test_results_that_are_not_there_yet_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psutil", reason="without it transformers finds no memory on a CPU")
    out = tmp_path / "bench.json"
    assert run(out, "--contenders", GENERATE) == 0
    capsys.readouterr()
    assert run(out, "--contenders", CONTINUOUS, "--limit-s", "0") == 1
    told = capsys.readouterr().out
    assert f"6 results, 1 of them in {out}" in told
    assert "5 results are not there yet" in told


def test_nothing_is_begun_after_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement takes as long as the whole limit."""
    now_s = 0.0

    def measured(bench_: bench.Bench, task: bench.Task, _: object) -> Result:
        nonlocal now_s
        now_s += 540.0
        return Result(task.section, task.case, task.contender, 540.0)

    monkeypatch.setattr(bench.Bench, "_measured", measured)
    device = torch.device("cpu")
    found = bench.Bench(
        TINY, (GATHER,), device, torch.float32, is_done=bench.LIMITS_KEY.__eq__, clock=lambda: now_s
    )
    assert [(each.section, each.seconds) for each in found.results(540.0)] == [(bench.KERNEL, 540.0)]


def test_what_it_cannot_keep_it_does_not_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    assert run(taken / "bench.json") == 2
    assert "--out cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("held", ["# Notes\n", '{"results": []}', "[]"])
@pytest.mark.parametrize("more", [[], ["--fresh"]])
def test_a_file_of_something_else_is_left_as_it_is(
    held: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback, and with `--fresh` the file was gone."""
    out = tmp_path / "notes.md"
    out.write_text(held)
    assert run(out, *more) == 2
    assert (
        capsys.readouterr().err
        == f"bench-gpu: --out: {out} holds no results of this benchmark; name another\n"
    )
    assert out.read_text() == held


def test_results_are_measured_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    for _ in range(2):
        assert run(out, "--limit-s", "0", "--fresh", "--contenders", GATHER) == 1
        assert list(results(out)) == [bench.LIMITS_KEY]


def test_what_has_no_room_for_the_network_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card of 16 GiB every result of every contender was a failure, and was kept as one."""
    monkeypatch.setattr(kv_pages, "free_bytes", lambda device: 16 << 30)
    monkeypatch.setattr(bench.Bench, "results", lambda *_: pytest.fail("it began"))
    assert command.main(["--device", "cpu", "--out", str(tmp_path / "bench.json")]) == 2
    kept = "its weights and 160,000 tokens' keys and values"
    told = f"8B takes 37.2 GiB for {kept} alone, and cpu has 16.0 GiB free; --tiny shows that it runs"
    assert capsys.readouterr().err == f"bench-gpu: {told}\n"


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_a_limit_is_a_number_of_seconds(tmp_path: Path, seconds: str) -> None:
    with pytest.raises(SystemExit) as refused:
        run(tmp_path / "bench.json", "--limit-s", seconds)
    assert refused.value.code == 2


def test_it_tells_whose_layers_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that were not taken are slower, and nothing else would show it."""
    assert run(tmp_path / "bench.json", "--contenders", GATHER, "--limit-s", "60") == 1
    assert "2 of 2 decoder layers are computed with fewer operations" in caplog.messages


def test_a_contender_that_fails_leaves_the_others_their_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(bench.Bench, "_decode", fail)
    out = tmp_path / "bench.json"
    assert run(out, "--contenders", GATHER) == 1
    notes = {key[0]: each["note"] for key, each in results(out).items()}
    assert notes["decode"] == "failed: RuntimeError: no kernel image is available"
    assert notes["prefill"] == ""
    told = capsys.readouterr().out
    assert "gather_sdpa failed: RuntimeError: no kernel image" in told
    assert "2 results failed, and stay so in the file: --fresh measures everything anew." in told


def test_what_comes_after_a_lost_card_is_left_to_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail, be a result, and never be measured again."""
    own_close = ModelRunner.close

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def close(runner: ModelRunner) -> None:
        own_close(runner)
        fail()

    out = tmp_path / "bench.json"
    with monkeypatch.context() as patch:
        patch.setattr(bench, "is_lost", lambda device: True)
        patch.setattr(bench.Bench, "_decode", fail)
        patch.setattr(ModelRunner, "close", close)
        assert run(out, *OURS_AND_GENERATE) == 1
    *before, lost = results(out).values()
    assert (lost["section"], lost["note"].partition(":")[0]) == ("decode", "failed")
    assert not any(each["note"] or each["contender"] == GENERATE for each in before)
    assert "results are not there yet: run the same command again" in capsys.readouterr().out

    assert run(out, *OURS_AND_GENERATE) == 1
    assert [key for key, each in results(out).items() if each["note"]] == [("decode", "1 x 20", GATHER)]
    assert len(results(out)) == 18


def test_results_of_another_card_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    Sheet(path, {"device": "one"}).add(Result("limits", "", "card"))
    assert len(list(Sheet(path, {"device": "one"}))) == 1
    with pytest.raises(OtherConditions, match="'two'"):
        Sheet(path, {"device": "two"})


def test_results_go_where_git_does_not_look() -> None:
    """And where they stay from one command to the next, so that the next goes on."""
    ignored = (Path(command.__file__).parents[2] / ".gitignore").read_text().split()
    assert f"{command.OUT.parts[0]}/" in ignored
    assert command._parser().parse_args([]).out == command.OUT


def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main(["--out", str(tmp_path / "new" / "none.json")]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


def test_continuous_batching_is_left_out_on_a_cpu_where_it_finds_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card is asked for its memory without that package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(tmp_path / "bench.json", "--contenders", CONTINUOUS) == 0
    assert "continuous is not here: needs the package psutil on a CPU" in capsys.readouterr().out
    card = torch.device("cuda", 0)
    assert contenders.why_absent(CONTINUOUS, TINY, card, torch.float32) is None


def test_continuous_batching_takes_what_it_is_given_here() -> None:
    """By the names that the installed transformers has."""
    names = {field.name for field in fields(ContinuousBatchingConfig)}
    config = ContinuousBatchingConfig(**batching_options(names, num_tokens=1000, step_tokens=64))
    assert (config.num_blocks, config.max_batch_tokens) == (4, 64)
    assert not any(config.cuda_graph_booleans)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="no psutil: it finds no memory")
def test_continuous_batching_answers_the_same(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert run(out, "--contenders", GENERATE, CONTINUOUS) == 0
    found = results(out)
    section, case = "greedy tokens", str(TINY.correct_tokens)
    assert found[section, case, CONTINUOUS]["outputs"] == found[section, case, GENERATE]["outputs"]
