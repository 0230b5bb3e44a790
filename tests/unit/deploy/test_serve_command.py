"""`python -m deploy`: what it says before anything starts, and of whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import __main__ as command
from deploy import environment
from deploy.errors import ClusterTimedOut, ProxyTimedOut, TimedOut
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
    file.write_text("a: " + "[" * 500 + "]" * 500)
    assert command.main(["serve", str(file)]) == 2
    assert "not YAML: nested too deep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "answer_s"),
    [
        (Path(DEPLOY).read_text(), 120.0),
        ("applications: [{deployments: [{name: Router, graceful_shutdown_timeout_s: 300.5}]}]", 300.5),
        ("applications: [{}, {deployments: [{name: Router, graceful_shutdown_timeout_s: '9'}]}]", 9.0),
        ("applications: [{deployments: [{name: Router}]}]", 0.0),
        ("applications: [{deployments: [{name: Replica, graceful_shutdown_timeout_s: 300}]}]", 0.0),
        ("applications: [{deployments: 3}]", 0.0),
        ("applications: [3, a]", 0.0),
        ("- 1", 0.0),
        ("a: [", 0.0),
    ],
)
def test_the_proxy_hears_how_long_the_files_routers_may_answer(
    text: str, answer_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray is imported; what is wrong with a file is said later."""
    heard: list[float] = []

    def hear(*_: object, router_answer_s: float, fast_proxy: bool) -> dict[str, str]:
        heard.append(router_answer_s)
        return {}

    monkeypatch.setattr(environment, "serve_environment", hear)
    file = tmp_path / "deploy.yaml"
    file.write_text(text)
    with command.before_ray(command._parser().parse_args(["serve", str(file)])):
        assert heard == [answer_s]


def test_a_folder_that_is_not_there_is_named_by_render(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "missing" / "out.yaml"
    assert command.main(["render", DEPLOY, "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert f"--output = '{output}': must be a file that can be written: No such file or directory" in said


@pytest.mark.parametrize("kind", [ClusterTimedOut, ProxyTimedOut])
def test_where_it_may_start_later_the_status_says_so(
    kind: type[TimedOut], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As sysexits.h has it: nothing has to be changed before it is tried again."""

    def time_out(_: object) -> int:
        raise kind(23.6, 2)

    monkeypatch.setattr(command, "_serve", time_out)
    assert command.main(["serve", DEPLOY]) == os.EX_TEMPFAIL
    assert "the load average is 23.6 on 2 CPUs" in capsys.readouterr().err


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
