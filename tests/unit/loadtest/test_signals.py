"""SIGTERM and SIGHUP end a process as Ctrl-C does: once, from the background too, and without a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.signals import deaf_children
from tests.fakes.starting import beginning

ROOT = Path(__file__).parents[3]
SCRIPT = """
import asyncio, pathlib, sys
from loadtest.signals import stop_on_signals

async def wait():
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.3)
        print("closed", flush=True)

stop_on_signals()
try:
    asyncio.run(wait())
except KeyboardInterrupt:
    print("stopped", flush=True)
    pathlib.Path(sys.argv[1]).write_text("kept")
"""


@contextlib.contextmanager
def started(
    kept: Path, *, ignored: signal.Signals | None = None, has_terminal: bool = False, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Gone at the end, whatever became of it."""
    command = beginning([sys.executable, "-c", SCRIPT, str(kept)], ignored=ignored, has_terminal=has_terminal)
    with subprocess.Popen(command, cwd=ROOT, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "sent",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM],
    ],
    ids=lambda sent: "-".join(each.name for each in sent),
)
def test_what_runs_is_closed_and_what_ran_is_kept(sent: list[signal.Signals], tmp_path: Path) -> None:
    with started(tmp_path / "kept", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for each in sent:
            process.send_signal(each)
        rest, _ = process.communicate(timeout=60)
    assert rest == "closed\nstopped\n"
    assert process.returncode == 0
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_background_job_can_be_ended(tmp_path: Path) -> None:
    """A shell starts it with SIGINT ignored."""
    with started(tmp_path / "kept", stdout=subprocess.PIPE, ignored=signal.SIGINT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "closed\nstopped\n"


def test_nohup_is_kept(tmp_path: Path) -> None:
    with started(tmp_path / "kept", stdout=subprocess.PIPE, ignored=signal.SIGHUP) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "closed\nstopped\n"


def test_a_terminal_that_is_closed_takes_nothing_with_it(tmp_path: Path) -> None:
    """What is printed after that goes nowhere; before, it raised, and what came after it was not done."""
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with started(tmp_path / "kept", has_terminal=True, start_new_session=True, **streams) as process:
        os.close(theirs)
        assert os.read(ours, 100).strip() == b"ready"
        os.close(ours)
        assert process.wait(60) == 0
    assert (tmp_path / "kept").read_text() == "kept"


def test_children_are_deaf_from_their_start_and_whoever_starts_them_is_not() -> None:
    """One that was still importing what it runs ended in a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    script = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    with deaf_children():
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == f"{sorted([*before, signal.SIGINT, signal.SIGHUP])}\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
