"""The router benchmark end to end, on a fleet small enough for a test, with Ray's tree beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import router
from benchmarks.router_report import Row


def test_a_small_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--quick", "--blocks", "6000", "--replicas", "2", "--prompts", "1k", "--json", str(out)]
    assert router.main([*arguments, "--parts", "index", "decision"]) == 0
    rows = json.loads(out.read_text())["rows"]
    index = [row["label"] for row in rows if row["section"].startswith("index")]
    assert index == [
        "bytes per block, process growth",
        "byte gauge / process growth",
        "match 1k, cold",
        "match 1k, half",
        "match 1k, all",
        "insert 1k",
        "remove 1k",
        "predict 1k",
        "a replica leaves",
    ]
    decision = [row["label"] for row in rows if row["section"] == "decision, 2 replicas, sha256"]
    assert decision == [
        "hash 1k",
        "choose 1k, half",
        "whole 1k, cold",
        "whole 1k, half",
        "whole 1k, all",
        "whole 1k, next turn",
        "queued 1k, half",
    ]
    compared = [row for row in rows if row["ray"] is not None]
    assert len(compared) == 6
    assert all(row["ours"]["p50_us"] > 0 and row["ray"]["p50_us"] > 0 for row in compared)
    assert "Targets" in capsys.readouterr().out


def test_the_event_loop_is_measured_with_events_and_requests(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--quick", "--blocks", "6000", "--replicas", "4", "--parts", "stall", "--json", str(out)]
    assert router.main(arguments) == 0
    stall, lateness = json.loads(out.read_text())["rows"]
    assert stall["ours"]["num_calls"] > 100
    assert lateness["ours"]["num_calls"] > 100
    longest, decisions, blocks = stall["note"].split("\n")
    assert longest == f"longest {stall['ours']['max_us'] / 1000:.1f} ms"
    assert not decisions.startswith("0 ")
    assert not blocks.startswith("0 ")


def test_what_a_router_tells_while_it_is_measured_does_not_tear_the_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("router.placement.late_replicas")

    def telling(*_: object) -> Iterator[Row]:
        logger.info("replica is late")
        logger.warning("replica is silent")
        yield from ()

    monkeypatch.setattr(router.router_stall, "rows", telling)
    with caplog.at_level("INFO"):
        assert router.main(["--quick", "--blocks", "6000", "--replicas", "2", "--parts", "stall"]) == 0
        logger.info("and now it does")
    assert caplog.messages == ["replica is silent", "and now it does"]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        router.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("index", "decision", "stall", "examples:", "--quick"))


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        router.main(["--replicas", "0"])
    assert end.value.code == 2
    assert "0 is not at least 1" in capsys.readouterr().err
