"""Locust against simulated replicas: every kind of user, headless in several processes, and the web page."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.ports import free_base
from loadtest.scenarios.catalogue import SCENARIOS
from replica.config import SimConfig
from tests.http_server import HttpServer, engine_server

ROOT = Path(__file__).parents[2]
LOCUST = (sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"))
SMALL = ("--scale", "0.1", "--pauses", "0.1")
RUN_S = 20


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    replica = {"runner": "simulated", "sim": SimConfig(num_blocks=4096), "max_wait_s": None}
    with engine_server(num_replicas=2, replica=replica, expose_routing=True, max_wait_s=None) as running:
        yield running


def locust(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(*LOCUST, *arguments, folder=folder)


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,  # the file finds what it imports from anywhere
        capture_output=True,
        text=True,
        env={**os.environ, "OPENAI_API_KEY": "", **variables},
        timeout=120,
    )


def test_every_user_headless_for_twenty_seconds_without_a_failure(server: HttpServer, tmp_path: Path) -> None:
    """In two processes, so that what workers count reaches the master."""
    users = ("--headless", "-u", "20", "-r", "20", "-t", f"{RUN_S}s", "--processes", "2")
    ended = locust(*users, *SMALL, "--host", server.url, "--csv", "run", "--only-summary", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    with (tmp_path / "run_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    for name in SCENARIOS:
        for kind in ("POST", "TTFT"):
            assert int(rows[kind, name]["Request Count"]) > 0, f"nobody finished {name}"
            assert int(rows[kind, name]["Failure Count"]) == 0
    total = int(rows["", "Aggregated"]["Request Count"])
    assert total == sum(int(row["Request Count"]) for (kind, _), row in rows.items() if kind == "POST")
    for name in SCENARIOS:
        assert f"\n{name} " in ended.stdout  # our own table
    assert "replica-0" in ended.stdout
    assert "replica-1" in ended.stdout
    assert "HTTP Request" not in ended.stderr  # locust shows what libraries log: a line per request


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]], ids=["one process", "workers"])
def test_a_server_that_is_not_there_is_one_line_and_no_table(processes: list[str], tmp_path: Path) -> None:
    """Without a limit of time: workers that had left were waited for until somebody came."""
    ended = locust("--headless", *processes, "--host", "http://127.0.0.1:1", folder=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("no OpenAI-compatible server answers at http://127.0.0.1:1") == 1
    assert "Traceback" not in ended.stderr
    assert "Aggregated" not in ended.stdout


def test_without_a_server_a_worker_that_does_not_leave_is_ended(tmp_path: Path) -> None:
    """Told to quit while it was still joining, it listened no more and stayed for ever."""
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import gevent\n"
        "from locust.runners import WorkerRunner\n"
        "from loadtest.locustfile import *\n"
        "WorkerRunner._send_stats = lambda self: gevent.sleep(1000)  # which it does when told\n"
        "WorkerRunner.heartbeat_timeout_checker = lambda self: gevent.sleep(1000)\n"
    )
    command = (*LOCUST[:3], "-f", str(deaf), "--headless", "--processes", "2")
    ended = run(*command, "--host", "http://127.0.0.1:1", folder=tmp_path, PYTHONPATH=str(ROOT))
    assert ended.returncode == 1
    assert ended.stderr.count("no OpenAI-compatible server answers at http://127.0.0.1:1") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--scale", "nan", "nan' is not a finite number"),
        ("--pauses", "-1", "-1 is below 0"),
        ("--timeout-s", "0", "0 is not above 0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    option: str, value: str, told: str, tmp_path: Path
) -> None:
    ended = locust("--headless", f"{option}={value}", folder=tmp_path)
    assert ended.returncode == 2
    assert f"argument {option}: " in ended.stderr
    assert told in ended.stderr


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_web_page_starts_a_run_and_shows_times_to_the_first_token(
    num_workers: int, server: HttpServer, tmp_path: Path
) -> None:
    """The page names the server: workers cannot look for it before."""
    port = free_base()
    where = ["--web-host", "127.0.0.1", "--web-port", str(port)]
    where += ["--processes", str(num_workers)] if num_workers else []
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*LOCUST, *where, *SMALL, "NoSharing"], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as page:
            _until(lambda: _answers(page), process, tmp_path / "log")
            _until(lambda: _num_workers(page) == num_workers, process, tmp_path / "log")
            wrong = {"user_count": "1", "spawn_rate": "1", "host": server.url, "scale": "nan"}
            assert page.post("/swarm", data=wrong).json()["success"]
            _until(lambda: "--scale" in str(_errors(page)), process, tmp_path / "log")
            page.post("/stop")
            _until(lambda: _state(page) == "stopped", process, tmp_path / "log")
            right = {"user_count": "2", "spawn_rate": "2", "host": server.url, "scale": "0.1"}
            assert page.post("/swarm", data=right).json()["success"]
            _until(lambda: ("TTFT", "no_sharing") in _rows(page), process, tmp_path / "log")
            assert _errors(page) == []
    finally:
        # As Ctrl-C would, of which gevent loses one in ten: it is raised in whichever greenlet runs.
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    # Locust's own page may be in the middle of an answer when it is ended, and says so by a traceback.
    said = (tmp_path / "log").read_text()
    assert "StopUser" not in said
    assert f'File "{ROOT / "loadtest"}' not in said


def _answers(page: httpx.Client) -> bool:
    try:
        return page.get("/").status_code == 200
    except httpx.ConnectError:
        return False


def _rows(page: httpx.Client) -> set[tuple[str, str]]:
    return {(row["method"], row["name"]) for row in page.get("/stats/requests").json()["stats"]}


def _errors(page: httpx.Client) -> list[Any]:
    found: list[Any] = page.get("/stats/requests").json()["errors"]
    return found


def _state(page: httpx.Client) -> str:
    return str(page.get("/stats/requests").json()["state"])


def _num_workers(page: httpx.Client) -> int:
    return len(page.get("/stats/requests").json().get("workers", []))


def _until(happened: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def test_a_run_that_is_started_with_other_settings_asks_by_those() -> None:
    """In the web page a process goes on from run to run, and what it has learnt of a server is of one."""
    script = """
from dataclasses import replace
from locust.env import Environment
from loadtest.client.endpoint import Endpoint
from loadtest.users.llm_user import LlmUser, Setting

class User(LlmUser):
    scenario_name = "chat"

def scenario(setting):
    LlmUser.setting = setting
    user = User(Environment())
    user.on_start()
    return user._the_scenario()

setting = Setting(Endpoint("http://x", "tiny", None), 1.0, 1.0, 1.0, 0, 0)
first = scenario(setting)
assert scenario(setting) is first
assert scenario(replace(setting, scale=0.1)) != first
assert scenario(replace(setting, pauses=0.0)) != first
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
