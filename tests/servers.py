"""A real server for tests: `python -m deploy serve` in its own process, ports and temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.errors import TRY_AGAIN
from deploy.ports import free_base

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300.0  # on a machine that others keep busy
START_ATTEMPTS = 3
STOP_LIMIT_S = 60.0


@dataclass(frozen=True)
class Server:
    """One running deployment."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    temp: Path

    def version(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/version", timeout=10).json()
        return answer

    def wait_until_whole(self, replicas: int = 2) -> None:
        """Until somebody stands in for whatever part of it was killed."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._has(replicas):
            assert time.monotonic() < deadline, f"it is not whole again: {self.log.read_text()[-4000:]}"
            time.sleep(0.2)

    def _has(self, replicas: int) -> bool:
        try:
            health = httpx.get(f"{self.url}/health", timeout=10)
        except httpx.HTTPError:
            return False
        return health.status_code == 200 and health.json()["replicas"] >= replicas

    def metric(self, name: str) -> float:
        """Sum over labels of one metric on /metrics; 0 when it has no sample."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def log_tails(self) -> list[tuple[str, str]]:
        """The file's name, and the end of it, of what each process of Serve's has logged."""
        logs = [self.log, *sorted(self.temp.glob("ray/session_2*/logs/serve/*.log"))]
        return [(log.name, log.read_text(errors="replace")[-4000:]) for log in logs]


def deploy_file(
    folder: Path,
    *,
    replicas: int = 2,
    routers: int = 1,
    replica: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    logging: dict[str, Any] | None = None,
    deployments: dict[str, dict[str, Any]] | None = None,
    proxy_location: str = "EveryNode",
) -> Path:
    """The project's own deploy.yaml with a few settings changed, written to `folder`.

    deployments: options of Serve's own, by the deployment's name.
    """
    content = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    content["proxy_location"] = proxy_location
    content["logging_config"].update(logging or {})
    application = content["applications"][0]
    application["args"]["replica"].update({"num_blocks": 1024, **(replica or {})})
    application["args"]["router"].update(router or {})
    for deployment in application["deployments"]:
        deployment["graceful_shutdown_timeout_s"] = 5
        deployment["num_replicas"] = {"Replica": replicas, "Router": routers}[deployment["name"]]
        deployment.update((deployments or {}).get(deployment["name"], {}))
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@contextlib.contextmanager
def running_server(
    *,
    proxy: str = "auto",
    options: Sequence[str] = (),
    module: str = "deploy",
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Start, wait until ready, yield, stop with SIGINT; what it printed is shown when it fails.

    options: more of `deploy serve`'s. module: whose command that is. environment: variables beside ours.
    settings: `deploy_file`'s.
    """
    temp = Path(tempfile.mkdtemp(prefix="wp", dir="/tmp"))  # short: Ray puts unix sockets below it
    log = temp / "server.log"
    command = [sys.executable, "-m", module, "serve", str(deploy_file(temp, **settings)), "--proxy", proxy]
    variables = {**os.environ, "RAY_TMPDIR": str(temp), "OMP_NUM_THREADS": "1", **(environment or {})}

    def start() -> Server:
        base = free_base()
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, "--port", str(base), *options],
                cwd=ROOT,
                env=variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return Server(f"http://127.0.0.1:{base}", process, log, temp)

    server, left = start(), START_ATTEMPTS - 1
    try:
        while not _is_ready_within(server, START_LIMIT_S):
            # Ray has a time of its own, which beside other clusters that start may be too short.
            is_temporary = left and server.process.poll() == TRY_AGAIN
            assert is_temporary, f"the server did not become ready:\n{log.read_text()[-4000:]}"
            server, left = start(), left - 1
        yield server
        assert stop(server.process) == 0
        assert "graceful_shutdown" not in log.read_text(), "an error that is none"
    finally:
        stop(server.process)
        assert_nothing_left(temp)
        shutil.rmtree(temp, ignore_errors=True)


def stop(process: subprocess.Popen[str]) -> int:
    """Ctrl-C, and its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # or its zombie is a warning in whatever test comes next
        raise


def processes_below(folder: Path) -> list[str]:
    """Command lines of all processes that name `folder`: Ray's own carry its session folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if (str(folder) in line or f"RAY_TMPDIR={folder}\0" in environment) and state != "Z":
                    found.append(f"{entry.name}: {line[:120]}")
    return found


def _is_ready_within(server: Server, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if "Ctrl-C stops everything" in server.log.read_text():
            return True
        if server.process.poll() is not None:
            break
        time.sleep(0.2)
    return False


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 10.0
    while (left := processes_below(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "still running after the server stopped:\n" + "\n".join(left)
