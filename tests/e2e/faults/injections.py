"""Harm from outside: signals to processes. No hook in what is tested knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

from tests.e2e.faults.processes import read

_GONE_LIMIT_S = 5.0


async def kill(pid: int) -> float:
    """SIGKILL. Returns its `time.monotonic()` once the process is gone.

    Raises ProcessLookupError if it was gone before.
    """
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while (process := read(pid)) is not None and process.is_alive:
        if time.monotonic() - killed_s > _GONE_LIMIT_S:
            raise AssertionError(f"process {pid} outlives SIGKILL")
        await asyncio.sleep(0.005)
    return killed_s


@contextlib.asynccontextmanager
async def paused(pid: int) -> AsyncIterator[None]:
    """SIGSTOP: it hangs with all its sockets open, until the end of the block. It may be killed meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def slowed(pid: int, factor: float, *, period_s: float = 0.1) -> AsyncIterator[None]:
    """Runs only 1/factor of the time: stopped and continued in turns, everything in it alike."""
    task = asyncio.create_task(_duty_cycle(pid, factor, period_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _duty_cycle(pid: int, factor: float, period_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(period_s * (1 - 1 / factor))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(period_s / factor)
