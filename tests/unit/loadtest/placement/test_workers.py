"""Processes that simulate end with whoever waits for them, and are deaf to what a terminal sends to all."""

from __future__ import annotations

import signal
import time

from loadtest.placement.workers import end_at_once, worker_pool


def test_what_is_computed_is_not_waited_for() -> None:
    """`kill PID` of a plan waited for fleets that nobody would read, minutes."""
    pool = worker_pool(1)
    assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
    pool.submit(time.sleep, 3_600)
    processes = list((pool._processes or {}).values())
    end_at_once(pool)
    for process in processes:
        process.join(60)
        assert process.exitcode is not None
