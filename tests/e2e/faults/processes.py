"""A server's processes by what they do: whom to kill, to stop, to count. Knows /proc; knows no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPLICA = "ray::ServeReplica:warmpath:Replica"
ROUTER = "ray::ServeReplica:warmpath:Router"
CONTROLLER = "ray::ServeController"
PROXY = "ray::HAProxyManager"  # of the fast proxy; Serve's own is a ProxyActor
PYTHON_PROXY = "ray::ProxyActor"
HAPROXY = "haproxy"
GCS = "gcs_server"


@dataclass(frozen=True, slots=True)
class Process:
    """One entry of /proc at one moment."""

    pid: int
    parent: int
    state: str  # of proc(5): R, S, T (stopped), Z (dead and not yet waited for) ...
    command: str

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"


def all_processes() -> Iterator[Process]:
    """Every process that can be read now."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found = read(int(entry.name))
            if found is not None:
                yield found


def read(pid: int) -> Process | None:
    """That process; None if there is none."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return Process(pid, parent=int(fields[1]), state=fields[0], command=command)


def descendants(root: int) -> list[Process]:
    """All living processes below `root`, whatever session or group they have put themselves in."""
    by_parent: dict[int, list[Process]] = {}
    for process in all_processes():
        by_parent.setdefault(process.parent, []).append(process)
    found, waiting = [], [root]
    while waiting:
        children = by_parent.get(waiting.pop(), [])
        found += [child for child in children if child.is_alive]
        waiting += [child.pid for child in children]
    return found


def resident_bytes(pid: int) -> int:
    """Memory that process holds now; 0 if it is gone."""
    try:
        pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096
