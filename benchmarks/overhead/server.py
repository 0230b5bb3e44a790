"""One server for a session: what `python -m deploy serve` starts, in the environment it is given.

`python -m benchmarks.overhead.server FILE PORT FOLDER PROXY`; writes the cluster's address into FOLDER.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from deploy.ports import Ports

ROOT = Path(__file__).parents[2]
ADDRESS_FILE = "address"
START_LIMIT_S, STOP_LIMIT_S = 600.0, 60.0  # on a machine that does much else
_POLL_S = 0.1
_LAST_WORDS_CHARS = 2000


class ServerFailed(RuntimeError):
    """The server did not start."""


def deploy_content(
    step_s: float, replicas: int, interval_s: float | None = None, *, has_channel: bool = True
) -> dict[str, Any]:
    """The project's own deploy.yaml with simulated replicas whose steps all take as long.

    interval_s: between two pieces of a stream; None: as shipped.
    has_channel: False: pieces are items of Ray's calls.
    """
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    application = content["applications"][0]
    application["args"] = {
        "replica": {
            "model": "tiny",
            "runner": "simulated",
            "num_blocks": 8192,
            "delta_channel": has_channel,
            "max_wait_s": None,  # the first long prompts find engines that do not know their speed yet
            "sim": {"base_s": step_s, "per_token_s": 0.0, "per_attention_s": 0.0, "per_sequence_s": 0.0},
        },
        "router": {"policy": "expected_time", "max_wait_s": None},
    }
    if interval_s is not None:
        application["args"]["replica"]["stream_interval_s"] = interval_s
    for deployment in application["deployments"]:
        deployment["graceful_shutdown_timeout_s"] = 2
        if deployment["name"] == "Replica":
            deployment["num_replicas"] = replicas
    return content


class Server:
    """The process, from before its start to after its end."""

    def __init__(self, folder: Path, port: int, content: dict[str, Any], *, has_haproxy: bool) -> None:
        """content: of deploy.yaml, but for the port."""
        self.port = port
        self._folder = folder
        self._replicas = _num_replicas(content)
        file = folder / "deploy.yaml"
        file.write_text(yaml.safe_dump(content))
        self._log = folder / "server.log"
        with self._log.open("w") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.overhead.server"),
                    *(str(file), str(port), str(folder), "haproxy" if has_haproxy else "python"),
                ],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> str:
        """The cluster's address. Raises ServerFailed."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if self._health() == self._replicas:
                return (self._folder / ADDRESS_FILE).read_text()
            time.sleep(_POLL_S)
        raise ServerFailed(f"it did not become ready:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what it has written."""
        return self._log.read_text(errors="replace")[-_LAST_WORDS_CHARS:]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _health(self) -> int:
        """Replicas that the Router is ready to use."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return int(yaml.safe_load(answer.read())["replicas"])
        except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            return 0


def _num_replicas(content: dict[str, Any]) -> int:
    deployments = content["applications"][0]["deployments"]
    return next(int(each["num_replicas"]) for each in deployments if each["name"] == "Replica")


def _write_address(folder: Path) -> None:
    """As soon as this process has started its cluster."""
    import ray

    while not ray.is_initialized():
        time.sleep(_POLL_S)
    (folder / ADDRESS_FILE).write_text(ray.get_runtime_context().gcs_address)


def main(argv: list[str]) -> int:
    file, port, folder, proxy = argv
    from deploy.launcher import launch  # imports Ray, which reads the environment

    threading.Thread(target=_write_address, args=(Path(folder),), daemon=True).start()
    return launch(Path(file), Ports(int(port)), Path(folder), fast_proxy=proxy == "haproxy", verbose=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
