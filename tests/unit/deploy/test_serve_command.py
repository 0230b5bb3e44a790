"""`python -m deploy`: what it says before anything starts, and of whatever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import __main__ as command
from deploy import environment
from tests.fakes.starting import beginning

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = str(ROOT / "deploy.yaml")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.parametrize("port", ["-5", "0", "65437", "70000"])
def test_a_port_out_of_range_is_named_with_what_is_accepted(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 is not "none given"."""
    assert command.main(["serve", DEPLOY, f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert f"--port = {port}: must be between 1 and 65436: ports" in said
    assert "Traceback" not in said


def test_a_port_of_the_file_that_leaves_no_room_for_its_span_is_named_as_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(Path(DEPLOY).read_text())
    content["http_options"]["port"] = 65500
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(content))
    assert command.main(["serve", str(file)]) == 2
    assert "http_options.port = 65500: must be between 1 and 65436" in capsys.readouterr().err


def test_a_file_that_is_nested_too_deep_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is read before all else."""
    monkeypatch.setattr(environment, "serve_environment", lambda *_, **__: {})  # this process keeps its own
    file = tmp_path / "deploy.yaml"
    file.write_text("a: " + "[" * 5000 + "]" * 5000)
    assert command.main(["serve", str(file)]) == 2
    assert "not YAML: nested too deep" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named_by_render(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "missing" / "out.yaml"
    assert command.main(["render", DEPLOY, "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert f"--output = '{output}': must be a file that can be written: No such file or directory" in said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_launcher_has_its_own_handler_leaves_no_folder(
    signum: signal.Signals, tmp_path: Path
) -> None:
    """Of a process started in the background, where SIGINT is ignored."""
    script = f"""
import os, signal, sys
from deploy import __main__ as command, environment
signal.signal(signal.SIGINT, signal.SIG_IGN)
environment.run_parent = lambda: {str(tmp_path)!r}
environment.serve_environment = lambda *_, **__: os.kill(os.getpid(), {int(signum)})
sys.exit(command.main(["serve", {DEPLOY!r}]))
"""
    done = subprocess.run(beginning([sys.executable, "-c", script]), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (command.INTERRUPTED, "Stopped.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["check", "render"])
def test_ctrl_c_is_no_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, f"_{name}", interrupted)
    assert command.main([name, DEPLOY]) == command.INTERRUPTED
    assert capsys.readouterr().err == "Stopped.\n"
