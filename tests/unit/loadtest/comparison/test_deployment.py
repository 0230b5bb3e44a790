"""Starting a contender and stopping it, with a launcher that only pretends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from deploy.errors import TRY_AGAIN
from loadtest.comparison import deployment
from loadtest.comparison.contender import Changes, of_policies
from loadtest.comparison.deployment import Deployment
from loadtest.comparison.errors import DeploymentFailed

ROOT = Path(__file__).parents[4]


def never() -> None:
    raise AssertionError("nobody said that the machine is busy")


def is_running(pid: int) -> bool:
    """A zombie that nobody has asked for is not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_launcher_leaves_behind_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\necho out of luck\nexit 1\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.fspath(launcher))
    (contender,) = of_policies(ROOT / "deploy.yaml", ["round_robin"], Changes())
    with pytest.raises(DeploymentFailed, match="out of luck"), Deployment(contender, on_busy=never):
        pass
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while is_running(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(left)


def test_where_too_much_runs_for_a_cluster_to_start_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other contenders have run by then, perhaps for an hour."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\necho start >> {tmp_path}/starts\necho busy\nexit {TRY_AGAIN}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.fspath(launcher))
    (contender,) = of_policies(ROOT / "deploy.yaml", ["round_robin"], Changes())
    told: list[str] = []
    with (
        pytest.raises(DeploymentFailed, match="busy"),
        Deployment(contender, on_busy=lambda: told.append("again")),
    ):
        pass
    assert (tmp_path / "starts").read_text() == deployment.START_ATTEMPTS * "start\n"
    assert told == ["again"] * (deployment.START_ATTEMPTS - 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_is_not_ready_in_time_is_stopped_and_told_which_option_gives_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model's weights took longer than the four minutes there were, and nothing could be done."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\necho reading weights\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.fspath(launcher))

    def still_reading(url: str) -> int:
        assert is_running(int(wait_for(tmp_path / "pid")))
        return 0

    monkeypatch.setattr(deployment, "_num_ready", still_reading)
    (contender,) = of_policies(ROOT / "deploy.yaml", ["round_robin"], Changes())
    told = r"round_robin was not ready within 0\.5 s \(--start-limit\); .*\nreading weights"
    with pytest.raises(DeploymentFailed, match=told), Deployment(contender, 0.5, on_busy=never):
        pass
    assert not is_running(int(wait_for(tmp_path / "pid")))


def wait_for(path: Path) -> str:
    """What is in it, once a line is."""
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return path.read_text()
