"""How much memory a process may still take: this machine's or its cgroup's, whichever is smaller.

Knows Linux's files and the portable fallback; knows nothing of models. GPU memory is asked of torch
where the device is known (`kv_pages.free_bytes`).
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
NO_LIMIT = 1 << 60  # bytes; version 1 of control groups writes "none" as a number beyond this


def free_host_bytes(meminfo: Path = MEMINFO, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes this process could allocate without swapping or being killed.

    The kernel's own estimate (page cache counts as free), cut to what a container's limit leaves.
    Without /proc (macOS) it is the machine's whole memory: a bound, not a measurement.
    """
    machine = _available_from_meminfo(meminfo)
    if machine is None:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = _left_in_cgroup(cgroup_root)
    return machine if container is None else min(machine, container)


def _available_from_meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_cgroup(root: Path) -> int | None:
    """Limit minus use, with reclaimable page cache counted as free; None without a limit."""
    for limit_file, usage_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            text = (root / limit_file).read_text().strip()
            limit = NO_LIMIT if text == "max" else int(text)
            usage = int((root / usage_file).read_text())
            statistics = (root / limit_file).parent.joinpath("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if limit >= NO_LIMIT:
            return None
        reclaimable = sum(
            int(line.split()[1]) for line in statistics.splitlines() if line.split()[0] == cache_key
        )
        return max(0, limit - usage + reclaimable)
    return None


def human_bytes(count: float) -> str:
    """ "1.5 GiB": for messages, two significant digits after the unit is chosen."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
