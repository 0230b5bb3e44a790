"""Processes that simulate end with whoever waits for them, and are deaf to what a terminal sends to all."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import wait

from loadtest.placement.workers import end_at_once, worker_pool


def test_what_is_computed_is_not_waited_for() -> None:
    """`kill PID` of a plan waited for fleets that nobody would read, minutes."""
    pool = worker_pool(1)
    assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
    asleep = pool.submit(time.sleep, 3_600)
    while not asleep.running():  # else it is cancelled, and nobody has to be ended
        time.sleep(0.01)
    processes = list((pool._processes or {}).values())
    end_at_once(pool)
    # Its pool's thread takes the exit codes, and who asks in that moment is told of none.
    assert all(wait([process.sentinel], 60) for process in processes)
