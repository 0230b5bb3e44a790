"""Starts a contender on a Ray cluster of its own, as `python -m deploy serve` does, and ends it.

Knows processes and `/health`; imports neither Ray nor the deployment's code.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from deploy.errors import TRY_AGAIN
from deploy.ports import free_base
from deploy.router_variable import ROUTER_VARIABLE
from loadtest.comparison.contender import Contender
from loadtest.comparison.errors import BadDeployment, DeploymentFailed, MachineBusy

START_LIMIT_S, STOP_LIMIT_S = 240.0, 60.0
START_ATTEMPTS = 3  # where the machine is busy: other contenders' hours may lie before this one's
_POLL_S = 0.2
_SHOWN_CHARS = 3000  # of its log


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Every contender is started in it. Raises BadDeployment for what would be laid over all their settings:
    they would be one deployment under several names."""
    if ROUTER_VARIABLE in environment:
        raise BadDeployment(
            f"{ROUTER_VARIABLE} is set in this shell and would be laid over every contender: unset it; what "
            "their Routers are to have goes into their files"
        )


def check(contender: Contender) -> None:
    """What can be found wrong before anything starts. Raises BadDeployment."""
    with tempfile.TemporaryDirectory() as folder:
        file = _written(contender, Path(folder))
        command = [sys.executable, "-m", "deploy", "check", str(file)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            told = ended.stderr.strip().replace(str(file), contender.label)
            raise BadDeployment(told[-_SHOWN_CHARS:])


class Deployment:
    """A context manager: the server answers inside it."""

    def __init__(
        self, contender: Contender, start_limit_s: float = START_LIMIT_S, *, on_busy: Callable[[], None]
    ) -> None:
        """on_busy: told each time that it is started once more, since the machine was too busy."""
        self._contender, self._start_limit_s = contender, start_limit_s
        self._on_busy = on_busy
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        """Raises DeploymentFailed."""
        for _ in range(START_ATTEMPTS - 1):
            try:
                self._bring_up()
            except MachineBusy:
                self._on_busy()
            else:
                return self
        self._bring_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _bring_up(self) -> None:
        """Raises DeploymentFailed, with nothing left of it."""
        # Short: Ray puts unix sockets below it, whose paths have at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="wp", dir="/tmp"))
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        port = free_base()
        self.url = self._contender.url(port)
        file = _written(self._contender, self._folder)
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deploy", "serve", str(file), "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for us: the report of what ran comes first
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + self._start_limit_s
        while self._process.poll() is None:
            if _num_ready(self.url) >= self._contender.num_replicas:
                return
            if time.monotonic() >= deadline_s:
                raise DeploymentFailed(self._contender.label, self._log_tail(), self._start_limit_s)
            time.sleep(_POLL_S)
        failed = MachineBusy if self._process.returncode == TRY_AGAIN else DeploymentFailed
        raise failed(self._contender.label, self._log_tail())

    def _stop(self) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_LIMIT_S)
        finally:  # Ctrl-C once more is impatience, and no reason to leave a cluster behind
            if self._process is not None:
                # Its own group, made at its start: what a launcher that died or hangs has left there.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _log_tail(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-_SHOWN_CHARS:]


def _written(contender: Contender, folder: Path) -> Path:
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump(dict(contender.content), sort_keys=False))
    return file


def _num_ready(url: str) -> int:
    """Replicas that the Router is ready to use."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return int(json.loads(answer.read())["replicas"])
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError):
        return 0
