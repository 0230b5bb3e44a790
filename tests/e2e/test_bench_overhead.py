"""The overhead benchmark end to end, with a real server, on a plan small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.server import Server, ServerFailed, deploy_content


@pytest.mark.long  # starting a cluster, Serve and a Router takes longer than everything that is measured
def test_a_small_run_measures_both_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert overhead.main(["--quick", "--replicas", "1", "--json", str(out)]) == 0
    requests, streams = json.loads(out.read_text())["rows"]
    assert requests["cell"]["output_tokens"] == 1
    assert requests["http"]["pieces"] == requests["direct"]["pieces"] == 1
    assert streams["cell"]["output_tokens"] == 100
    assert 5 < streams["http"]["pieces"] <= 100
    for row in (requests, streams):
        assert row["http"]["first_p50_ms"] > 0
        assert row["direct"]["num_requests"] == row["http"]["num_requests"] >= 8
        assert row["http"]["cpu_ms"]["Router"] > row["direct"]["cpu_ms"]["Router"]
    assert "Targets" in capsys.readouterr().out


@pytest.mark.long  # imports Ray in a process of its own
def test_a_server_that_does_not_come_up_leaves_its_last_words(tmp_path: Path) -> None:
    """Its log goes with the folder it ran in; what it said is all that tells why."""
    content = deploy_content(0.005, 1)
    content["applications"][0]["args"]["router"]["policy"] = "no such policy"
    server = Server(tmp_path, 1, content, has_haproxy=False)
    try:
        with pytest.raises(ServerFailed, match="no such policy"):
            server.wait_until_ready()
        assert "no such policy" in server.last_words()
    finally:
        server.stop()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        overhead.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("default", "throughput", "fast", "examples:", "--quick"))


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        overhead.main(["--concurrency", "0"])
    assert end.value.code == 2
    assert "0 is not at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--markdown", "--plot"])
def test_a_file_that_cannot_be_written_is_found_out_before_anything_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was after eleven minutes."""
    with pytest.raises(SystemExit) as end:
        overhead.main([option, str(tmp_path / "missing" / "out")])
    assert end.value.code == 2
    assert "missing/out cannot be written" in capsys.readouterr().err


def test_a_missing_matplotlib_is_found_out_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.arguments.importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit) as end:
        overhead.main(["--plot", str(tmp_path / "out.png")])
    assert end.value.code == 2
    assert "plots need matplotlib" in capsys.readouterr().err
