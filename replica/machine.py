"""What a replica computes on, named so that two that share it have one name; and how many it has room for.

Knows no model and no engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in so many, or "max"


def machine_of(device: str) -> str:
    """device: as torch names it, "cpu" or "cuda:0"; "simulated" computes nothing and shares nothing: "".

    Replicas on a CPU share all cores that they can see: those of a host, or of a container, which has a host
    name of its own. Replicas on a card share that card, if each has a part of it.
    """
    if device.startswith("cuda"):
        import torch

        return f"card {torch.cuda.get_device_properties(device).uuid}"
    return f"{socket.gethostname()} {_boot_id()}" if device == "cpu" else ""


def engines_at_once(device: str, num_threads: int | None) -> float:
    """How many engines of so many threads the machine computes, none slowing another; at least 1.

    num_threads: None = one for each core. Two hardware threads of one core count as two: a virtual
    machine does not tell them apart. A card computes one at a time, and "simulated" nothing.
    """
    if device != "cpu" or num_threads is None:
        return 1.0
    return max(1.0, _num_cores() / num_threads)


def _num_cores() -> float:
    """That this process may use: those it is bound to, or what its container is limited to."""
    bound = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        used, period = CPU_LIMIT.read_text(encoding="ascii").split()
        return min(bound, int(used) / int(period))
    return bound


def _boot_id() -> str:
    """Of two hosts of one name, as fresh images often are, the one and the other. Linux alone has it."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""
