"""Which signals stop a service, and what happens to those that follow."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import stop_signals
from tests.fakes.starting import beginning

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in stop_signals.SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("signum", stop_signals.SIGNALS)
def test_the_first_interrupts_and_no_other_does(signum: signal.Signals) -> None:
    script = f"""
import os, signal
from deploy import stop_signals
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background
stop_signals.catch(stop_signals.interrupt)
try:
    os.kill(os.getpid(), {int(signum)})
except KeyboardInterrupt:
    for each in stop_signals.SIGNALS:
        os.kill(os.getpid(), each)
    print("stopped", flush=True)
"""
    done = subprocess.run(beginning([sys.executable, "-c", script]), cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("stopped\n", "")


@pytest.mark.parametrize(
    ("before", "is_caught"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)], ids=["nohup", "terminal"]
)
def test_nohup_is_heard(before: signal.Handlers, is_caught: bool) -> None:
    signal.signal(signal.SIGHUP, before)
    stop_signals.catch(stop_signals.interrupt)
    assert (signal.getsignal(signal.SIGHUP) is stop_signals.interrupt) == is_caught


def test_what_is_said_to_a_terminal_that_is_gone_raises_nothing() -> None:
    """Else the word "Stopped." would be the end of what stops all the rest."""
    script = """
import os, signal
from deploy import stop_signals
stop_signals.catch(stop_signals.interrupt)
try:
    os.write(1, b"ready")
    signal.pause()
except KeyboardInterrupt:
    os.write(1, b"stopped")
    os.write(2, b"stopped")
"""
    pid, terminal = pty.fork()
    if pid == 0:  # the leader of the terminal's session
        os.chdir(ROOT)
        os.execv(sys.executable, beginning([sys.executable, "-c", script]))
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
