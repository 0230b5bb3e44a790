"""An installation that only serves has neither matplotlib nor locust: commands run, and plots are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import loadtest.comparison
import loadtest.placement
from loadtest.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[3]
WITHOUT = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "locust"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
runpy.run_module("loadtest", run_name="__main__", alter_sys=True)
"""
PLACES = {"simulate": ["--requests", "20"], "plan": ["--ttft-p99", "1"], "bench-placement": []}
SERVERS = {
    "replay": ["--url", "http://127.0.0.1:1"],
    "compare": ["--policy", "round_robin"],
    "sweep": ["--policy", "round_robin", "--ttft", "1"],
    "bench-fleet": [],
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_needs_no_extra() -> None:
    """It ended in a traceback, as all of it did."""
    told = run("--help")
    assert told.returncode == 0, told.stderr
    assert all(name in told.stdout for name in COMMANDS)


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has imported it, and what draws by it, long ago."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for package, name in ((loadtest.comparison, "figures"), (loadtest.placement, "plots")):
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)


@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize("command", [*PLACES, *SERVERS])
def test_plots_are_refused_with_what_to_install_before_anything_runs(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, *(PLACES | SERVERS)[command], "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        "loadtest: plots need matplotlib: pip install -e '.[loadtest]', or ask for --no-plots\n"
    )
    assert not (tmp_path / "out").exists()


def test_without_plots_a_report_is_made(tmp_path: Path) -> None:
    own = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "cells"), "--workers", "1"]
    few = ["--workload", "no_reuse", "--replicas", "2", "--policy", "round_robin", "--requests", "20"]
    told = run("simulate", *few, *own, "--no-plots")
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "out" / "report.md").exists()
