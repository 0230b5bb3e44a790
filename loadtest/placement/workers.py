"""Processes that simulate: fresh ones, which leave signals to whoever waits for them, and end with it.

Knows no simulation.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process


def worker_pool(num_workers: int) -> ProcessPoolExecutor:
    """Fresh interpreters: a fork would copy the locks of the parent's threads (the progress bar has one)."""
    return ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_leave_the_end_to_the_parent
    )


def end_at_once(pool: ProcessPoolExecutor) -> None:
    """What nobody waits for any more dies with its processes."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _leave_the_end_to_the_parent() -> None:
    # A terminal sends these to all of its processes, and so do `timeout` and service managers.
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """A parent that was killed ends nobody, and a pool's processes would wait for its next call for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
