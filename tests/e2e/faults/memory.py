"""Memory of the processes that live through a load, by what they do: whether it grows all the time.

Replicas that are killed take theirs along; Routers and proxies are there from the first to the last, and see
every request. Knows processes; knows neither load nor what is promised of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace

from tests.e2e.faults import processes
from tests.e2e.faults.checks import Row, memory_slope, slope_of
from tests.e2e.faults.cluster import Cluster
from tests.e2e.faults.processes import resident_bytes

SAMPLE_S = 2.0
# For four or five minutes allocators and what is kept of decisions fill up, and a line through that says how
# fast they do: 5 MiB a minute of six minutes, 0.8 of thirteen.
LEAST_S = 540.0
# Of Routers and proxies together. Overload may add 10 MiB from one third of it to the next; here what grows
# for hours has to be told from an allocator that has taken one more arena in the minutes that are looked at.
LIMIT_MIB_PER_MINUTE = 2.0
HELD: Mapping[str, Collection[str]] = {
    "Routers": (processes.ROUTER,),
    "proxies": (processes.PROXY, processes.PYTHON_PROXY, processes.HAPROXY),
}
TOLD: Mapping[str, Collection[str]] = {"Serve's controller": (processes.CONTROLLER,)}  # not ours to hold


class MemoryWatch:
    """Samples of processes that were there at its beginning. Owner: one task."""

    def __init__(
        self,
        pids_by_role: Mapping[str, Collection[int]],
        *,
        size_of: Callable[[int], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pids_by_role = pids_by_role
        self._size_of = size_of
        self._clock = clock
        self._times: list[float] = []
        self._sizes = {pid: list[int]() for pids in pids_by_role.values() for pid in pids}

    def look(self) -> None:
        """One more sample of each."""
        self._times.append(self._clock())
        for pid, sizes in self._sizes.items():
            sizes.append(self._size_of(pid))

    def samples(self, *roles: str) -> list[tuple[float, int]]:
        """(seconds, bytes) of those that lived all the time, added up; [] if none of them did."""
        pids = {pid for role in roles for pid in self._pids_by_role.get(role, ())}
        lived = [self._sizes[pid] for pid in pids if all(self._sizes[pid])]
        if not lived:
            return []
        return [(at, sum(sizes)) for at, sizes in zip(self._times, zip(*lived, strict=True), strict=True)]


@contextlib.asynccontextmanager
async def watched(running: Cluster) -> AsyncIterator[MemoryWatch]:
    """The memory of this cluster's long-lived processes, until the end of the block."""
    watch = MemoryWatch(
        {
            role: [each.pid for kind in kinds for each in running.processes(kind)]
            for role, kinds in {**HELD, **TOLD}.items()
        }
    )
    task = asyncio.create_task(_look_on(watch))
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def row(promise: str, watch: MemoryWatch) -> Row:
    """What Routers and proxies grow by together, each role's part beside it."""
    found = memory_slope(promise, watch.samples(*HELD), mib_per_minute=LIMIT_MIB_PER_MINUTE, least_s=LEAST_S)
    if found.is_kept is None:
        return found
    parts = [f"{role} {slope_of(watch.samples(role)):.3g}" for role in (*HELD, *TOLD)]
    return replace(found, measured=f"{found.measured} ({', '.join(parts)})")


async def _look_on(watch: MemoryWatch) -> None:
    while True:
        watch.look()
        await asyncio.sleep(SAMPLE_S)
