"""Processes that simulate: fresh ones, which leave signals to whoever waits for them. Knows no simulation."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def worker_pool(num_workers: int) -> ProcessPoolExecutor:
    """Fresh interpreters: a fork would copy the locks of the parent's threads (the progress bar has one)."""
    return ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_leave_interrupts_to_the_parent
    )


def end_at_once(pool: ProcessPoolExecutor) -> None:
    """What nobody waits for any more dies with its processes."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _leave_interrupts_to_the_parent() -> None:
    for each in (signal.SIGINT, signal.SIGHUP):  # a terminal sends both to all of its processes
        signal.signal(each, signal.SIG_IGN)
