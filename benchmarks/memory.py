"""This process's memory: what it holds now, and the most it held since the last reset. Linux."""

from __future__ import annotations

import gc
from pathlib import Path

from cache import heap

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    return _field("VmRSS")


def peak_bytes() -> int:
    """The high-water mark since `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Give freed memory back to the system, then start a new high-water mark."""
    gc.collect()
    heap.give_back()
    CLEAR_REFS.write_text("5")


def _field(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {name}: peak memory can be measured on Linux only")
