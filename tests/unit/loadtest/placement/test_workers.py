"""Processes that simulate end with whoever waits for them, and are deaf to what is sent to a whole group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from loadtest.placement.workers import end_at_once, worker_pool

ROOT = Path(__file__).parents[4]
SCRIPT = """
import os, signal, time
from loadtest.placement.workers import worker_pool

if __name__ == "__main__":
    pool = worker_pool(1)
    pool.submit(os.getpid).result()
    pool.submit(time.sleep, 300)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_what_is_sent_to_all_is_the_parents(sent: signal.Signals) -> None:
    """`timeout 1h` ended the cells under way, each told as failed; the parent would have waited for them."""
    pool = worker_pool(1)
    assert pool.submit(signal.getsignal, sent).result() == signal.SIG_IGN
    pool.shutdown()


def test_nobody_is_left_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Its processes waited for a next cell, with all their memory, until somebody found them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # The worker has the same standard output: it is at its end once both are gone.
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL


def test_what_is_computed_is_not_waited_for() -> None:
    """`kill PID` of a plan waited for fleets that nobody would read, minutes."""
    pool = worker_pool(1)
    asleep = pool.submit(time.sleep, 3_600)
    while not asleep.running():  # else it is cancelled, and nobody has to be ended
        time.sleep(0.01)
    processes = list((pool._processes or {}).values())
    end_at_once(pool)
    # Its pool's thread takes the exit codes, and who asks in that moment is told of none.
    assert all(wait([process.sentinel], 60) for process in processes)
