"""The watchdog in virtual time, and once where processors are short.

That it really ends a process is tested in tests/integration/.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cache.log_fields import fields_of
from replica.engine import watchdog as watchdog_module
from replica.engine.watchdog import Watchdog
from tests.fakes.engine import VirtualClock


def build(clock: VirtualClock) -> tuple[Watchdog, list[str]]:
    fired: list[str] = []
    return Watchdog(clock=clock, poll_interval_s=1.0, on_hang=lambda: fired.append("hang")), fired


def test_a_task_within_its_limit_is_left_alone() -> None:
    clock = VirtualClock()
    watchdog, fired = build(clock)
    watchdog.begin("step", 5.0)
    clock.sleep(5.0)
    assert not watchdog.check()
    watchdog.end()
    clock.sleep(100.0)
    assert not watchdog.check()
    assert fired == []


def test_a_longer_one_is_acted_on_once_with_the_stack(caplog: pytest.LogCaptureFixture) -> None:
    """The one log line names what hung and where the thread stands."""
    clock = VirtualClock()
    watchdog, fired = build(clock)
    release, began = threading.Event(), threading.Event()

    def stuck_in_here() -> None:
        watchdog.begin("step", 5.0, lambda: ["r-1", "r-2"])
        began.set()
        release.wait()

    thread = threading.Thread(target=stuck_in_here)
    thread.start()
    began.wait()
    clock.sleep(5.1)
    with caplog.at_level(logging.CRITICAL):
        assert [watchdog.check() for _ in range(3)] == [True, True, True]
    release.set()
    thread.join()
    assert fired == ["hang"]
    [record] = caplog.records
    assert "stuck_in_here" in record.getMessage()
    assert fields_of(record)["request_ids"] == ["r-1", "r-2"]


def test_limits_belong_to_the_task() -> None:
    """Warm-up may take minutes where a step may take seconds."""
    clock = VirtualClock()
    watchdog, fired = build(clock)
    watchdog.begin("warm-up", 600.0)
    clock.sleep(500.0)
    assert not watchdog.check()
    watchdog.begin("step", 5.0)
    clock.sleep(6.0)
    assert watchdog.check()
    assert fired == ["hang"]


def test_close_may_be_called_twice_and_before_start() -> None:
    watchdog, _ = build(VirtualClock())
    watchdog.close()
    started, _ = build(VirtualClock())
    started.start()
    started.close()
    started.close()


def test_a_stopped_process_is_not_taken_for_a_hung_step() -> None:
    """Frozen for a minute and continued: the step could not go on, and may now."""
    clock = VirtualClock()
    watchdog, fired = build(clock)
    watchdog.begin("step", 5.0)
    clock.sleep(60.0)
    watchdog.note_idle(late_s=59.0, waited_s=0.0)
    assert not watchdog.check()
    clock.sleep(4.1)
    assert watchdog.check()
    assert fired == ["hang"]


def test_a_little_lateness_excuses_nothing() -> None:
    clock = VirtualClock()
    watchdog, _ = build(clock)
    watchdog.begin("step", 5.0)
    for _ in range(6):
        clock.sleep(1.0)
        watchdog.note_idle(late_s=0.9, waited_s=0.0)
    assert watchdog.check()


@pytest.mark.parametrize("late_s", [0.0, 0.9, 3.0])
def test_a_thread_that_waits_for_a_processor_is_not_taken_for_a_hung_one(late_s: float) -> None:
    """Nine tenths of the time others have it. That the watchdog is late, too, is not another excuse."""
    clock = VirtualClock()
    watchdog, fired = build(clock)
    watchdog.begin("step", 5.0)
    for _ in range(12):  # 48 s, 4.8 of them its own
        clock.sleep(4.0)
        watchdog.note_idle(late_s=late_s, waited_s=3.6)
        assert not watchdog.check()
    clock.sleep(0.3)
    assert watchdog.check()
    assert fired == ["hang"]


def test_what_it_waited_before_a_task_does_not_excuse_that() -> None:
    clock = VirtualClock()
    watchdog, _ = build(clock)
    watchdog.begin("step", 5.0)
    clock.sleep(100.0)
    watchdog.note_idle(late_s=0.0, waited_s=100.0)
    watchdog.begin("step", 5.0)
    clock.sleep(5.1)
    assert watchdog.check()


def test_what_it_waited_before_it_was_watched_excuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "waited_for_processor_s", lambda _: 100.0)
    clock = VirtualClock()
    watchdog, _ = build(clock)
    watchdog.begin("step", 5.0)
    watchdog._look()
    clock.sleep(5.1)
    assert watchdog.check()


# A thread computes for OWN_S on a processor that it shares with others who never rest, then it hangs.
SHORT_OF_PROCESSORS = """
import os, subprocess, sys, threading, time
from replica.engine.watchdog import Watchdog

OWN_S, LIMIT_S, NUM_OTHERS = 0.3, 1.0, 8
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_OTHERS)]
has_fired = threading.Event()
watchdog = Watchdog(clock=time.monotonic, poll_interval_s=0.1, on_hang=has_fired.set)

def work():
    watchdog.begin("step", LIMIT_S)
    began_s = time.monotonic()
    while time.thread_time() < OWN_S:
        pass
    watchdog.end()
    print(time.monotonic() - began_s > LIMIT_S, has_fired.is_set())
    watchdog.begin("step", LIMIT_S)
    print(has_fired.wait(30.0), flush=True)

try:
    watchdog.start()
    engine = threading.Thread(target=work)
    engine.start()
    engine.join()
finally:
    for other in others:
        other.kill()
"""


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell who waits for a processor"
)
def test_where_others_have_the_processor_a_step_may_take_longer_and_a_hang_is_still_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SHORT_OF_PROCESSORS], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.splitlines() == ["True False", "True"], ended.stderr


def test_a_hang_that_cannot_be_told_of_is_acted_on_all_the_same() -> None:
    """A process that hangs because its log could not be written would hang for ever."""

    def unknown() -> list[str]:
        raise RuntimeError("dictionary changed size during iteration")

    clock = VirtualClock()
    watchdog, fired = build(clock)
    watchdog.begin("step", 5.0, unknown)
    clock.sleep(6.0)
    with pytest.raises(RuntimeError):
        watchdog.check()
    assert fired == ["hang"]


def test_a_thread_that_hangs_in_its_own_log_line_is_acted_on_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads the log's pipe any more: the line that waits there has the handler, and would have had
    the watchdog wait behind it."""
    monkeypatch.setattr(watchdog_module, "TELL_LIMIT_S", 0.05)
    is_read, began = threading.Event(), threading.Event()

    class Pipe(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            began.set()
            is_read.wait()

    clock = VirtualClock()
    watchdog, fired = build(clock)
    pipe = Pipe()
    logging.getLogger("replica").addHandler(pipe)
    try:

        def step() -> None:
            watchdog.begin("step", 5.0)
            logging.getLogger("replica").warning("a line")

        engine = threading.Thread(target=step)
        engine.start()
        began.wait()
        clock.sleep(6.0)
        watching = threading.Thread(target=watchdog.check, daemon=True)
        watching.start()
        watching.join(5.0)
        assert fired == ["hang"]
    finally:
        is_read.set()
        engine.join()
        watching.join()
        logging.getLogger("replica").removeHandler(pipe)
