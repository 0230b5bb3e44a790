"""CPU time of a server's processes, by what they are for. Knows Ray's process titles; imports no Ray.

/proc tells who they are; their time comes from Linux's own clock for each, since /proc counts hundredths of a
second: as much as one process uses for a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.overhead.samples import Part

PROC = Path("/proc")
_TITLES = {
    "ray::ProxyActor": Part.PROXY,
    "ray::HAProxyManager": Part.PROXY,
    "ray::ServeReplica:warmpath:Router": Part.ROUTER,
    "ray::ServeReplica:warmpath:Replica": Part.REPLICA,
}


def process_cpu_s(pid: int) -> float:
    """User and system time of a process so far, with that of its threads that have ended: seconds.

    Raises OSError if there is none. Source: clock_getcpuclockid(3), which Python does not offer.
    """
    return time.clock_gettime((~pid << 3) | 2)


class ServerProcesses:
    """The processes below one server: its Serve replicas and whatever proxies it runs."""

    def __init__(self, pids: dict[int, Part], clock: Callable[[int], float] = process_cpu_s) -> None:
        """clock: seconds of CPU that a process has used; raises OSError where it has ended."""
        self._pids = pids
        self._clock = clock

    @classmethod
    def below(
        cls, pid: int, proc: Path = PROC, clock: Callable[[int], float] = process_cpu_s
    ) -> ServerProcesses:
        """Those that the process `pid` started, and theirs. Raises LookupError if a part is missing."""
        children = _children(proc)
        found: dict[int, Part] = {}
        queue = [pid]
        while queue:
            parent = queue.pop()
            for child in children.get(parent, ()):
                queue.append(child)
                if (part := _part_of(proc / str(child))) is not None:
                    found[child] = part
        missing = set(Part) - set(found.values())
        if missing:
            raise LookupError(f"no process of {', '.join(sorted(missing))} below process {pid}")
        return cls(found, clock)

    def cpu_s(self) -> dict[Part, float]:
        """User and system time so far, by part. Raises LookupError when one of them has ended."""
        total = dict.fromkeys(Part, 0.0)
        for pid, part in self._pids.items():
            try:
                total[part] += self._clock(pid)
            except OSError:
                raise LookupError(f"process {pid} ({part}) ended while it was measured") from None
        return total


def difference(after: dict[Part, float], before: dict[Part, float]) -> dict[Part, float]:
    return {part: after[part] - before[part] for part in Part}


def _children(proc: Path) -> dict[int, list[int]]:
    """Process ids by parent's."""
    children: dict[int, list[int]] = {}
    for folder in _folders(proc):
        with contextlib.suppress(OSError):  # it has just ended
            children.setdefault(int(_stat(folder)[1]), []).append(int(folder.name))
    return children


def _folders(proc: Path) -> Iterator[Path]:
    return (entry for entry in proc.iterdir() if entry.name.isdigit())


def _stat(folder: Path) -> list[str]:
    """The fields behind the process's name, which may hold spaces: its state first."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _part_of(folder: Path) -> Part | None:
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    title = words[0].decode(errors="replace")
    if Path(title).name == "haproxy":
        return Part.PROXY
    return next((part for start, part in _TITLES.items() if title.startswith(start)), None)
